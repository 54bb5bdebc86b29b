//! Drawing by hand: escaping, axes, colours.

use std::fmt::Write as _;

use crate::attribute::ledger::Line;

/// Appends formatted text; writing to a `String` cannot fail.
macro_rules! put {
    ($out:expr, $($arg:tt)*) => {{
        let _ = write!($out, $($arg)*);
    }};
}
pub(super) use put;

/// Text as HTML or as an attribute's value; control characters that no page may hold become U+FFFD.
pub(super) fn escape(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for each in text.chars() {
        match each {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\'' => safe.push_str("&#39;"),
            '\n' | '\t' => safe.push(' '),
            each if each.is_control() => safe.push('\u{fffd}'),
            each => safe.push(each),
        }
    }
    safe
}

/// Colours of arms: Okabe and Ito's set, which colour-blind readers can tell apart.
const ARMS: [&str; 7] = [
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#808890",
];

/// Colour of the arm at this position.
pub(super) fn arm_colour(position: usize) -> &'static str {
    ARMS[position % ARMS.len()]
}

/// Colour of a kind of time; the two sides share it and differ by the hatching of [`is_hatched`].
pub(super) fn line_colour(name: &str) -> &'static str {
    match name.rsplit_once('.').map_or(name, |(_, kind)| kind) {
        "compute" => "#0072b2",
        "other_work" => "#56b4e9",
        "run_queue" => "#d55e00",
        "wakeup" => "#e69f00",
        "throttled" => "#882255",
        "irq" => "#cc79a7",
        "softirq" => "#aa4499",
        "steal" => "#6f5bd6",
        "stopped" => "#999933",
        "blocked" => "#117733",
        "accept_queue" => "#44aa99",
        "network" => "#8c9aa8",
        "syn" => "#f0e442",
        "syn_ack" => "#ddcc77",
        "data" => "#b8a000",
        "delayed_ack" => "#a6761d",
        _ => "#b9bec4",
    }
}

/// The server's lines are hatched, so that the sides differ without a second set of colours.
pub(super) fn is_hatched(name: &str) -> bool {
    name.starts_with("server.")
}

/// The pattern behind [`is_hatched`]; once per page.
pub(super) const HATCH: &str = "<svg aria-hidden=\"true\" style=\"position:absolute;width:0;height:0;min-width:0\"><defs>\
<pattern id=\"hatch\" width=\"6\" height=\"6\" patternUnits=\"userSpaceOnUse\" patternTransform=\"rotate(45)\">\
<rect width=\"2\" height=\"6\" style=\"fill:var(--hatch)\"/></pattern></defs></svg>";

/// A bar in the colour and hatching of a ledger line.
pub(super) fn bar(out: &mut String, name: &str, [x, y, width, height]: [f64; 4], title: &str) {
    put!(
        out,
        "<g><title>{}</title><rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" fill=\"{}\"/>",
        escape(title),
        line_colour(name)
    );
    if is_hatched(name) {
        put!(
            out,
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" fill=\"url(#hatch)\"/>"
        );
    }
    out.push_str("</g>");
}

/// What the colours of these lines mean, in report order.
pub(super) fn line_legend(out: &mut String, is_used: impl Fn(&str) -> bool) {
    out.push_str("<ul class=\"legend\">");
    for line in Line::all() {
        let name = line.name();
        if is_used(name) {
            out.push_str("<li><svg viewBox=\"0 0 14 12\">");
            bar(out, name, [0.0, 0.0, 14.0, 12.0], name);
            put!(out, "</svg>{name}</li>");
        }
    }
    out.push_str("</ul>");
}

/// What the colours of the arms mean.
pub(super) fn arm_legend(out: &mut String, names: &[&str]) {
    out.push_str("<ul class=\"legend\">");
    for (position, name) in names.iter().enumerate() {
        put!(
            out,
            "<li><svg viewBox=\"0 0 14 12\"><rect y=\"4\" width=\"14\" height=\"4\" fill=\"{}\"/></svg>{}</li>",
            arm_colour(position),
            escape(name)
        );
    }
    out.push_str("</ul>");
}

/// Round values between `low` and `high`, about `count` of them.
pub(super) fn ticks(low: f64, high: f64, count: f64) -> Vec<f64> {
    let span = high - low;
    if span <= 0.0 || !span.is_finite() {
        return vec![low];
    }
    let rough = span / count;
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .map(|each| each * power)
        .find(|&step| step >= rough)
        .unwrap_or(power * 10.0);
    let first = (low / step - 1e-9).ceil() as i64;
    let last = (high / step + 1e-9).floor() as i64;
    (first..=last).map(|each| each as f64 * step).collect()
}

/// An axis of ns, linear, or logarithmic where the range asks for it.
#[derive(Clone, Copy)]
pub(super) struct NsAxis {
    low: f64,
    high: f64,
    is_log: bool,
    /// Pixels of `low` and of `high`.
    from: f64,
    to: f64,
}

/// A wider range than this is drawn on a logarithmic axis.
const LOG_ABOVE: f64 = 20.0;

impl NsAxis {
    pub(super) fn new(low_ns: u64, high_ns: u64, from: f64, to: f64) -> Self {
        let (low, high) = (low_ns.max(1) as f64, high_ns.max(2) as f64);
        let is_log = high / low > LOG_ABOVE;
        let (low, high) = if is_log {
            (low * 0.9, high * 1.1)
        } else {
            let margin = ((high - low) * 0.08).max(high * 0.02);
            ((low - margin).max(0.0), high + margin)
        };
        Self {
            low,
            high,
            is_log,
            from,
            to,
        }
    }

    pub(super) fn at(self, ns: f64) -> f64 {
        let t = if self.is_log {
            (ns.max(self.low) / self.low).ln() / (self.high / self.low).ln()
        } else {
            (ns - self.low) / (self.high - self.low)
        };
        self.from + t * (self.to - self.from)
    }

    pub(super) fn is_log(self) -> bool {
        self.is_log
    }

    pub(super) fn ticks(self) -> Vec<f64> {
        if !self.is_log {
            return ticks(self.low, self.high, 6.0);
        }
        let decades = (self.low.log10().floor() as i32)..=(self.high.log10().ceil() as i32);
        let steps: &[f64] = if self.high / self.low > 3e3 {
            &[1.0]
        } else {
            &[1.0, 2.0, 5.0]
        };
        decades
            .flat_map(|decade| steps.iter().map(move |step| step * 10f64.powi(decade)))
            .filter(|ns| (self.low..=self.high).contains(ns))
            .collect()
    }
}

/// A tick in ms, without zeros that say nothing.
pub(super) fn ms(ns: f64) -> String {
    let text = format!("{:.6}", ns / 1e6);
    let text = text.trim_end_matches('0').trim_end_matches('.');
    if text.is_empty() { "0" } else { text }.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round() {
        assert_eq!(ticks(0.0, 10.0, 5.0), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
        assert_eq!(ms(1_500_000.0), "1.5");
        assert_eq!(ms(0.0), "0");
    }

    #[test]
    fn nothing_escapes() {
        assert_eq!(
            escape("<a href='x'>&\"\u{1b}"),
            "&lt;a href=&#39;x&#39;&gt;&amp;&quot;\u{fffd}"
        );
    }
}
