//! Swim-lanes: who ran, who waited and what crossed the wire around one request.

use std::{cmp::Reverse, collections::BTreeMap, fmt::Write as _};

use super::svg::{escape, put, ticks};
use crate::report::{
    summary::{Lane, LaneSpan, SwimLanes},
    text,
};

const WIDTH: f64 = 1080.0;
const LEFT: f64 = 112.0;
const RIGHT: f64 = 14.0;
const BAR: f64 = 20.0;
/// Height of one row of mark labels.
const LABEL: f64 = 12.0;
/// Marks that find no room in this many rows keep their tick and tooltip.
const LABEL_ROWS: usize = 3;
/// Spans narrower than this are drawn as wide, pixels.
const TINY: f64 = 0.8;
/// Spans narrower than this share their place with their neighbours, pixels.
const SMALL: f64 = 2.0;
/// One of those in this many pixels.
const SMALL_PLACE: f64 = 4.0;
/// Pixels per character, on the safe side of an 11 px sans.
const CHARACTER: f64 = 6.0;

/// A stretch without any event that is longer than this share of the request asks for a closer look at the rest.
const BORING: f64 = 0.4;
/// Fewer events are not worth a drawing of their own.
const CLOSE_LOOK_EVENTS: usize = 3;
/// A closer look at a greater share of the request would look the same.
const CLOSE_LOOK_MAX: f64 = 0.4;

/// All lanes of one request, and a closer look where one long stretch hides the rest.
pub(super) fn draw(out: &mut String, lanes: &SwimLanes) {
    let end_ns = lanes.latency_ns.min(i64::MAX as u64) as i64;
    strip(out, lanes, 0, end_ns.max(1));
    for (from_ns, to_ns) in closer_looks(lanes, end_ns) {
        put!(
            out,
            "<p class=\"note\">Closer: {} from {} on</p>",
            text::duration((to_ns - from_ns) as u64),
            text::duration(from_ns as u64)
        );
        strip(out, lanes, from_ns, to_ns);
    }
}

/// What the classes' colours mean.
pub(super) fn legend(out: &mut String) {
    out.push_str("<ul class=\"legend\">");
    for (class, meaning) in [
        ("run", "runs for this request's side"),
        ("other", "other request or task"),
        ("runnable", "runnable, waits"),
        ("sleep", "asleep"),
        ("idle", "CPU idle"),
        ("irq", "hard interrupt"),
        ("softirq", "softirq"),
        ("steal", "stolen by the hypervisor"),
        ("throttled", "throttled by a cgroup quota"),
        ("stopped", "stopped by a signal"),
        ("wire", "on the wire"),
        ("lost", "lost, to be sent again"),
    ] {
        put!(
            out,
            "<li><svg viewBox=\"0 0 14 12\"><rect width=\"14\" height=\"12\" style=\"fill:{}\"/></svg>{meaning}</li>",
            colour(class)
        );
    }
    out.push_str("</ul>");
}

fn colour(class: &str) -> &'static str {
    match class {
        "run" => "#0072b2",
        "other" => "#56b4e9",
        "runnable" => "#d55e00",
        "sleep" => "var(--sleep)",
        "idle" => "var(--idle)",
        "irq" => "#cc79a7",
        "softirq" => "#aa4499",
        "steal" => "#6f5bd6",
        "throttled" => "#e69f00",
        "stopped" => "#9c2f2f",
        "lost" => "#c0392b",
        "wire" => "#8c9aa8",
        _ => "#b9bec4",
    }
}

/// Class of the label on a span, by the contrast it needs.
fn label_class(class: &str) -> &'static str {
    match class {
        "sleep" | "idle" => "t",
        "run" | "softirq" | "steal" | "stopped" | "lost" => "on",
        _ => "dark",
    }
}

fn strip(out: &mut String, lanes: &SwimLanes, from_ns: i64, to_ns: i64) {
    let scale = (WIDTH - LEFT - RIGHT) / (to_ns - from_ns) as f64;
    let x = |ns: i64| LEFT + (ns.clamp(from_ns, to_ns) - from_ns) as f64 * scale;
    let placed: Vec<_> = lanes
        .lanes
        .iter()
        .map(|lane| place_labels(lane, from_ns, to_ns, x))
        .collect();
    let rows = |labels: &[Placed<'_>]| {
        labels
            .iter()
            .filter_map(|label| label.row)
            .max()
            .map_or(0, |row| row + 1)
    };
    let heights: Vec<f64> = placed
        .iter()
        .map(|labels| rows(labels) as f64 * LABEL + BAR + 10.0)
        .collect();
    let body: f64 = heights.iter().sum();
    let height = body + 26.0;
    put!(
        out,
        "<div class=\"scroll\"><svg viewBox=\"0 0 {WIDTH} {height:.0}\" role=\"img\" aria-label=\"Timeline of request \
         {}\">",
        lanes.request
    );
    let (unit, ns_per_unit) = if to_ns - from_ns >= 2_000_000 {
        ("ms", 1e6)
    } else {
        ("µs", 1e3)
    };
    for tick in ticks(from_ns as f64 / ns_per_unit, to_ns as f64 / ns_per_unit, 9.0) {
        let at = x((tick * ns_per_unit).round() as i64);
        let number = format!("{tick:.3}");
        put!(
            out,
            "<line class=\"grid\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"0\" y2=\"{body:.1}\"/>\
             <text class=\"t\" x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
            body + 16.0,
            number.trim_end_matches('0').trim_end_matches('.')
        );
    }
    put!(
        out,
        "<text class=\"t\" x=\"0\" y=\"{:.1}\">time, {unit}</text>",
        body + 16.0
    );
    let mut top = 0.0;
    for ((lane, labels), height) in lanes.lanes.iter().zip(&placed).zip(heights) {
        let bar_top = top + height - BAR - 6.0;
        put!(
            out,
            "<text x=\"0\" y=\"{:.1}\">{}</text>",
            bar_top + 14.0,
            escape(&fit(&lane.name, LEFT - 6.0))
        );
        // A busy lane has thousands of these on the same pixels: the longest of each place stands for them.
        let mut small: BTreeMap<u32, &LaneSpan> = BTreeMap::new();
        let mut draw = |span: &LaneSpan| draw_span(out, span, [x(span.start_ns), x(span.end_ns), bar_top]);
        for span in &lane.spans {
            if span.end_ns <= from_ns || span.start_ns >= to_ns {
                continue;
            }
            let (left, right) = (x(span.start_ns), x(span.end_ns));
            if right - left >= SMALL {
                draw(span);
                continue;
            }
            let longest = small.entry((left / SMALL_PLACE) as u32).or_insert(span);
            if span.end_ns - span.start_ns > longest.end_ns - longest.start_ns {
                *longest = span;
            }
        }
        // Last, so that they lie on top.
        small.into_values().for_each(&mut draw);
        for label in labels {
            let text_y = label.row.map(|row| bar_top - 4.0 - (row as f64) * LABEL);
            put!(
                out,
                "<g><title>{} at {}</title><line x1=\"{2:.1}\" x2=\"{2:.1}\" y1=\"{3:.1}\" y2=\"{4:.1}\" \
                 style=\"stroke:var(--fg)\" stroke-width=\"1\"/>",
                escape(label.text),
                text::difference(label.at_ns),
                label.x,
                text_y.map_or(bar_top - 3.0, |y| y + 1.0),
                bar_top + BAR
            );
            if let Some(y) = text_y {
                put!(
                    out,
                    "<text class=\"t\" x=\"{:.1}\" y=\"{y:.1}\" text-anchor=\"{}\">{}</text>",
                    label.text_x,
                    label.anchor,
                    escape(label.text)
                );
            }
            out.push_str("</g>");
        }
        top += height;
    }
    out.push_str("</svg></div>");
}

fn draw_span(out: &mut String, span: &LaneSpan, [from, to, top]: [f64; 3]) {
    // What happened must be seen, however short it was.
    let width = (to - from).max(TINY);
    put!(
        out,
        "<g><title>{}{}{}, {} from {}</title><rect x=\"{from:.1}\" y=\"{top:.1}\" width=\"{width:.1}\" \
         height=\"{BAR}\" style=\"fill:{}\"/>",
        escape(span.class),
        if span.label.is_empty() { "" } else { ": " },
        escape(&span.label),
        text::duration(span.end_ns.saturating_sub(span.start_ns).max(0) as u64),
        text::difference(span.start_ns),
        colour(span.class)
    );
    let shown = fit(&span.label, width - 8.0);
    if !shown.is_empty() {
        put!(
            out,
            "<text class=\"{}\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
            label_class(span.class),
            from + 4.0,
            top + 14.0,
            escape(&shown)
        );
    }
    out.push_str("</g>");
}

/// As much of the text as fits, or nothing if that would be less than three letters.
fn fit(text: &str, pixels: f64) -> String {
    let room = (pixels / CHARACTER).floor().max(0.0) as usize;
    let long = text.chars().count();
    if long <= room {
        text.to_owned()
    } else if room < 4 {
        String::new()
    } else {
        let mut kept: String = text.chars().take(room - 1).collect();
        kept.push('\u{2026}');
        kept
    }
}

struct Placed<'a> {
    at_ns: i64,
    x: f64,
    text: &'a str,
    text_x: f64,
    anchor: &'static str,
    /// Row above the bar, from 0; `None` where there is no room.
    row: Option<usize>,
}

fn place_labels(lane: &Lane, from_ns: i64, to_ns: i64, x: impl Fn(i64) -> f64) -> Vec<Placed<'_>> {
    let mut marks: Vec<_> = lane
        .marks
        .iter()
        .filter(|mark| (from_ns..=to_ns).contains(&mark.at_ns))
        .collect();
    marks.sort_by_key(|mark| mark.at_ns);
    // Stretches of each row that are taken by labels or by the ticks that rise through it.
    let mut taken: [Vec<(f64, f64)>; LABEL_ROWS] = Default::default();
    let mut placed = Vec::with_capacity(marks.len());
    for mark in marks {
        let at = x(mark.at_ns);
        let width = mark.label.chars().count() as f64 * CHARACTER + 6.0;
        let right = (at + 2.0, at + 2.0 + width);
        let left = (at - 2.0 - width, at - 2.0);
        let mut found = None;
        'rows: for row in 0..LABEL_ROWS {
            for (span, text_x, anchor) in [(right, at + 3.0, "start"), (left, at - 3.0, "end")] {
                let inside = span.0 >= LEFT - 2.0 && span.1 <= WIDTH;
                let free = |row: &Vec<(f64, f64)>, (from, to): (f64, f64)| {
                    row.iter().all(|&(a, b)| to <= a || from >= b)
                };
                let tick = (at - 1.0, at + 1.0);
                if inside && free(&taken[row], span) && taken[..=row].iter().all(|row| free(row, tick)) {
                    found = Some((row, span, text_x, anchor));
                    break 'rows;
                }
            }
        }
        if let Some((row, span, text_x, anchor)) = found {
            taken[row].push(span);
            for lower in &mut taken[..=row] {
                lower.push((at - 1.0, at + 1.0));
            }
            placed.push(Placed {
                at_ns: mark.at_ns,
                x: at,
                text: &mark.label,
                text_x,
                anchor,
                row: Some(row),
            });
        } else {
            placed.push(Placed {
                at_ns: mark.at_ns,
                x: at,
                text: &mark.label,
                text_x: at,
                anchor: "start",
                row: None,
            });
        }
    }
    placed
}

/// What lies before and after the longest stretch without events, if that stretch is a [`BORING`] one.
fn closer_looks(lanes: &SwimLanes, end_ns: i64) -> Vec<(i64, i64)> {
    let mut events: Vec<i64> = lanes
        .lanes
        .iter()
        .flat_map(|lane| {
            let marks = lane.marks.iter().map(|mark| mark.at_ns);
            let spans = lane.spans.iter().flat_map(|span| [span.start_ns, span.end_ns]);
            marks.chain(spans)
        })
        .filter(|at_ns| (0..=end_ns).contains(at_ns))
        .chain([0, end_ns])
        .collect();
    events.sort_unstable();
    events.dedup();
    let gap_ns = |last: usize| events[last + 1] - events[last];
    let Some(last) = (0..events.len().saturating_sub(1)).max_by_key(|&last| (gap_ns(last), Reverse(last)))
    else {
        return vec![];
    };
    if (gap_ns(last) as f64) < end_ns as f64 * BORING {
        return vec![];
    }
    let (before, after) = events.split_at(last + 1);
    [before, after]
        .into_iter()
        .filter(|events| events.len() >= CLOSE_LOOK_EVENTS)
        .map(|events| {
            let (from_ns, to_ns) = (events[0], events[events.len() - 1]);
            // A little of the stretch itself stays in sight.
            let air_ns = (to_ns - from_ns) / 12 + 1;
            ((from_ns - air_ns).max(0), (to_ns + air_ns).min(end_ns))
        })
        .filter(|(from_ns, to_ns)| (to_ns - from_ns) as f64 <= end_ns as f64 * CLOSE_LOOK_MAX)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::fixtures;

    #[test]
    fn a_long_wait_gets_closer_looks_at_what_came_before_and_after() {
        let lanes = &fixtures::two_arms().lanes[1];
        let end_ns = lanes.latency_ns as i64;
        let looks = closer_looks(lanes, end_ns);
        assert_eq!(looks.len(), 2, "{looks:?}");
        assert!(looks[0].0 == 0 && looks[0].1 < 300_000, "{looks:?}");
        assert!(looks[1].0 > end_ns - 600_000 && looks[1].1 == end_ns, "{looks:?}");
    }

    #[test]
    fn an_even_request_needs_no_closer_look() {
        let mut lanes = fixtures::two_arms().lanes[1].clone();
        lanes.latency_ns = 600_000;
        assert_eq!(closer_looks(&lanes, 600_000), []);
    }

    #[test]
    fn labels_of_a_row_never_meet() {
        let lanes = &fixtures::two_arms().lanes[3];
        for lane in &lanes.lanes {
            let end_ns = lanes.latency_ns as i64;
            let scale = (WIDTH - LEFT - RIGHT) / end_ns as f64;
            let labels = place_labels(lane, 0, end_ns, |ns| LEFT + ns as f64 * scale);
            let extent = |label: &Placed<'_>| {
                let width = label.text.chars().count() as f64 * CHARACTER;
                if label.anchor == "end" {
                    (label.text_x - width, label.text_x)
                } else {
                    (label.text_x, label.text_x + width)
                }
            };
            for (position, one) in labels.iter().enumerate() {
                for other in &labels[position + 1..] {
                    if one.row.is_some() && one.row == other.row {
                        let (a, b) = (extent(one), extent(other));
                        assert!(a.1 <= b.0 || b.1 <= a.0, "{} meets {}", one.text, other.text);
                    }
                }
            }
        }
    }
}
