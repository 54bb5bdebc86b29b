//! What a request page of a Gatling report holds, by the marks that its versions have in common.

use serde_json::Value;

use super::script::literal;

/// A request page, as far as it is of use here.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Page {
    /// The request's name, from the title.
    pub(super) title: Option<String>,
    /// The table's rows: their titles, and the cells of the columns total, OK and KO; none where a cell is empty or a dash.
    pub(super) rows: Vec<(String, Vec<Option<f64>>)>,
    /// Labels of the distribution, ms.
    pub(super) labels: Vec<f64>,
    /// Percents of what went well.
    pub(super) ok: Vec<f64>,
    /// First and last second in which requests began, s since 1970; empty or one.
    pub(super) active_s: Vec<(i64, i64)>,
}

impl Page {
    /// Titles such as `99th percentile`, and what they are as a quantile.
    pub(super) fn percentile_titles(&self) -> impl Iterator<Item = (&str, f64)> {
        self.rows.iter().filter_map(|(title, _)| {
            let number = title.strip_suffix("percentile")?.trim();
            let number = number.trim_end_matches(char::is_alphabetic);
            let percent: f64 = number.parse().ok()?;
            (0.0..=100.0).contains(&percent).then(|| {
                // 99.9 / 100 is not the nearest to 0.999.
                let quantile = format!("{:.6}", percent / 100.0)
                    .parse()
                    .unwrap_or(percent / 100.0);
                (title.as_str(), quantile)
            })
        })
    }

    /// What `percentiles1` and so on of the statistics are: as the table says, else Gatling's defaults.
    pub(super) fn quantiles(&self) -> Vec<f64> {
        let told: Vec<f64> = self.percentile_titles().map(|(_, quantile)| quantile).collect();
        if told.is_empty() {
            vec![0.5, 0.75, 0.95, 0.99]
        } else {
            told
        }
    }
}

/// Reads a page. What it does not have stays empty.
///
/// # Errors
/// The line, from 1, at which data that begin do not end, and which data they are.
pub(super) fn parse(text: &str) -> Result<Page, (usize, &'static str)> {
    let mut page = Page {
        title: between(text, "<title>Gatling Stats - ", "</title>").map(unescaped),
        rows: rows(text),
        ..Page::default()
    };
    let fails = |at: usize, what| (super::line_of(text, at), what);
    if let Some(axis) = text.find("'Percentage of ") {
        let begin = text[..axis].rfind("new Highcharts").unwrap_or(0);
        let end = text[axis..]
            .find("new Highcharts")
            .map_or(text.len(), |at| axis + at);
        if let Some(at) = text[begin..axis].rfind("categories:") {
            let at = begin + at + "categories:".len();
            page.labels =
                numbers(&text[at..]).ok_or_else(|| fails(at, "the labels of the distribution break off"))?;
        }
        let series = text[axis..end].find("name: 'OK'").map(|at| axis + at);
        if let Some(at) = series.and_then(|at| Some(at + text[at..end].find("data:")? + "data:".len())) {
            page.ok =
                numbers(&text[at..]).ok_or_else(|| fails(at, "the bars of the distribution break off"))?;
        } else {
            return Err(fails(axis, "the distribution has no series named OK"));
        }
    }
    if let Some(at) = activity(text) {
        let seconds = literal(&text[at..]).map_err(|_| fails(at, "the requests per second break off"))?;
        page.active_s = active(&seconds).into_iter().collect();
    }
    Ok(page)
}

fn between<'a>(text: &'a str, begin: &str, end: &str) -> Option<&'a str> {
    let (_, rest) = text.split_once(begin)?;
    rest.split_once(end).map(|(found, _)| found.trim())
}

fn unescaped(text: &str) -> String {
    text.replace("&lt;", "<")
        .replace("&gt;", ">")
        .replace("&quot;", "\"")
        .replace("&#39;", "'")
        .replace("&amp;", "&")
}

/// Rows of tables whose first cell is a title.
fn rows(text: &str) -> Vec<(String, Vec<Option<f64>>)> {
    let rows = text.split("<td class=\"title\">").skip(1);
    rows.filter_map(|row| {
        let row = row.split_once("</tr>").map_or(row, |(row, _)| row);
        let (title, rest) = row.split_once('<')?;
        let cells = rest.split("<td").skip(1).map(|cell| {
            let (_, cell) = cell.split_once('>')?;
            let (cell, _) = cell.split_once('<')?;
            cell.replace(',', "")
                .trim()
                .parse()
                .ok()
                .filter(|value: &f64| value.is_finite())
        });
        Some((title.trim().to_owned(), cells.collect()))
    })
    .collect()
}

/// An array of numbers, each with or without quotes.
fn numbers(text: &str) -> Option<Vec<f64>> {
    let array = literal(text).ok()?;
    let numbers = array.as_array()?.iter().map(|each| {
        each.as_f64()
            .or_else(|| each.as_str()?.trim().parse().ok())
            .filter(|value| value.is_finite())
    });
    let found: Option<Vec<f64>> = numbers.collect();
    // Without labels a list has one empty string.
    found.or_else(|| (array == serde_json::json!([""])).then(Vec::new))
}

/// Where the numbers of requests per second begin: packed in a variable in older pages, in the chart itself in newer ones.
fn activity(text: &str) -> Option<usize> {
    for name in ["var requests = unpack(", "var container_requests = unpack("] {
        if let Some(at) = text.find(name) {
            return Some(at + name.len());
        }
    }
    let at = text.find("Number of requests per second")?;
    let begin = at + text[at..].find("data: [[")? + "data: ".len();
    Some(begin)
}

/// First and last second with a request: a second is `[time, number]` or `[time, [all, OK, KO]]`, its time in s or in ms.
fn active(seconds: &Value) -> Option<(i64, i64)> {
    /// Later than any s, earlier than any ms, since 1970.
    const MS: f64 = 1e11;
    let seconds = seconds.as_array()?.iter().filter_map(|second| {
        let time = second.get(0)?.as_f64()?;
        let number = second.get(1)?;
        let number = number.as_f64().or_else(|| number.get(0)?.as_f64())?;
        (number > 0.0).then_some(if time > MS { time / 1e3 } else { time } as i64)
    });
    let seconds: Vec<i64> = seconds.collect();
    Some((*seconds.iter().min()?, *seconds.iter().max()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_of_seconds_are_read() {
        assert_eq!(
            active(&serde_json::json!([
                [10, [0, 0, 0]],
                [11, [2, 2, 0]],
                [12, [1, 1, 0]]
            ])),
            Some((11, 12))
        );
        assert_eq!(
            active(&serde_json::json!([
                [1_700_000_000_000_u64, 3],
                [1_700_000_001_000_u64, 0]
            ])),
            Some((1_700_000_000, 1_700_000_000))
        );
        assert_eq!(active(&serde_json::json!([[10, 0]])), None);
    }

    #[test]
    fn a_page_that_breaks_off_names_its_line() {
        let text = "<html>\nnew Highcharts.Chart({ categories: ['1', '2'],\n'Percentage of Requests'\nname: 'OK', data: [\n 75.12, 2";
        let (line, what) = parse(text).expect_err("cut");
        assert_eq!((line, what), (4, "the bars of the distribution break off"));
    }

    #[test]
    fn the_tables_titles_are_quantiles() {
        let page = Page {
            rows: rows(
                "<td class=\"title\">99.9th percentile</td><td id=\"a\">1,039</td><td>-</td></tr><td class=\"title\">Max</td></tr>",
            ),
            ..Page::default()
        };
        assert_eq!(page.quantiles(), [0.999]);
        assert_eq!(page.rows[0].1, [Some(1_039.0), None]);
    }
}
