//! What must hold of every audit: honest figures, rounded in whatever usual way, are never called impossible.

use proptest::prelude::*;

use super::{
    check,
    claim::{Claim, Table},
    finding::Level,
    gatling,
    population::Population,
};

/// A way of rounding to whole numbers.
#[derive(Clone, Copy, Debug)]
enum Rounding {
    Down,
    Nearest,
    Up,
}

impl Rounding {
    fn of(self, value: f64) -> f64 {
        match self {
            Self::Down => value.floor(),
            Self::Nearest => value.round(),
            Self::Up => value.ceil(),
        }
    }
}

fn rounding() -> impl Strategy<Value = Rounding> {
    prop_oneof![Just(Rounding::Down), Just(Rounding::Nearest), Just(Rounding::Up)]
}

/// How a publisher makes a page of latencies.
#[derive(Clone, Copy, Debug)]
struct Publisher {
    /// Latencies to the labels of the histogram.
    values: Rounding,
    /// Figures to those of the table.
    figures: Rounding,
    /// Percents are cut, or rounded to the nearest.
    cuts: bool,
    /// Statistics are of the labels, or of the latencies before they were rounded.
    of_labels: bool,
    /// Percentiles are interpolated, or samples.
    interpolates: bool,
    /// Squares are divided by n - 1, or by n.
    one_less: bool,
}

prop_compose! {
    fn publisher()(
        values in rounding(),
        figures in rounding(),
        flags in any::<[bool; 4]>(),
    ) -> Publisher {
        let [cuts, of_labels, interpolates, one_less] = flags;
        Publisher { values, figures, cuts, of_labels, interpolates, one_less }
    }
}

/// Latencies, ms: most in a narrow body, some in a tail.
fn latencies(longest: f64) -> impl Strategy<Value = Vec<f64>> {
    let one = prop_oneof![9 => 0.2..4.0, 1 => 0.2..longest];
    prop::collection::vec(one, 2..1_500)
}

const QUANTILES: [f64; 4] = [0.5, 0.75, 0.95, 0.99];

impl Publisher {
    fn percentile(self, ascending: &[f64], quantile: f64) -> f64 {
        let last = ascending.len() - 1;
        if self.interpolates {
            let at = quantile * last as f64;
            let (low, share) = (at.floor() as usize, at.fract());
            ascending[low] + share * (ascending[(low + 1).min(last)] - ascending[low])
        } else {
            ascending[crate::statistics::rank(ascending.len(), quantile)]
        }
    }

    fn claim(self, value: f64) -> Option<Claim> {
        Some(Claim {
            value: self.figures.of(value),
            unit: 1.0,
        })
    }

    fn percent(self, number: usize, all: usize) -> f64 {
        let hundredths = number as f64 * 1e4 / all as f64;
        (if self.cuts {
            hundredths.floor()
        } else {
            hundredths.round()
        }) / 1e2
    }

    fn publish(self, latencies: &[f64]) -> Population {
        let mut truth = latencies.to_vec();
        truth.sort_by(f64::total_cmp);
        let labels: Vec<f64> = truth.iter().map(|&each| self.values.of(each)).collect();
        let told = if self.of_labels { &labels } else { &truth };
        let all = told.len() as f64;
        let mean = told.iter().sum::<f64>() / all;
        let squares: f64 = told.iter().map(|each| (each - mean).powi(2)).sum();
        let deviation = (squares / if self.one_less { all - 1.0 } else { all }).sqrt();
        let requests = told.len() as u64;
        let table = Table {
            column: "total".to_owned(),
            requests,
            min: self.claim(told[0]),
            max: self.claim(told[told.len() - 1]),
            mean: self.claim(mean),
            deviation: self.claim(deviation),
            percentiles: QUANTILES
                .iter()
                .filter_map(|&quantile| Some((quantile, self.claim(self.percentile(told, quantile))?)))
                .collect(),
        };
        let (names, percents) = self.bars(&labels);
        let histogram = gatling::bars(requests, requests, &names, &percents);
        assert!(histogram.is_ok(), "as many labels as bars");
        Population {
            arm: "arm".to_owned(),
            tables: vec![table],
            histograms: vec![("total".to_owned(), histogram)],
            ..Population::default()
        }
    }

    /// The values that occur, or a hundred bars named by their middles.
    fn bars(self, labels: &[f64]) -> (Vec<f64>, Vec<f64>) {
        let (min, max) = (labels[0], labels[labels.len() - 1]);
        let names: Vec<f64> = if max - min <= 100.0 {
            let mut names = labels.to_vec();
            names.dedup();
            names
        } else {
            let step = (max - min) / 100.0;
            (0..100)
                .map(|bar| (min + step * f64::from(bar) + step / 2.0).round())
                .collect()
        };
        let of = |label: f64| {
            if max - min <= 100.0 {
                return label;
            }
            let step = (max - min) / 100.0;
            let bar = ((label.min(max - 1.0) - min) / step).floor().min(99.0);
            (min + step * bar + step / 2.0).round()
        };
        let percents = names.iter().map(|&name| {
            let number = labels.iter().filter(|&&label| of(label) == name).count();
            self.percent(number, labels.len())
        });
        let percents = percents.collect();
        (names, percents)
    }
}

fn set(figure: &mut Option<Claim>, value: f64) {
    *figure = Some(Claim { value, unit: 1.0 });
}

fn impossible(population: &Population) -> Vec<String> {
    check::examine(population)
        .into_iter()
        .filter(|finding| finding.level == Level::Impossible)
        .map(|finding| format!("{}: {} ({})", finding.check, finding.claimed, finding.allowed))
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn honest_figures_are_never_impossible(publisher in publisher(), latencies in latencies(60.0)) {
        let found = impossible(&publisher.publish(&latencies));
        prop_assert!(found.is_empty(), "{found:?}");
    }

    #[test]
    fn nor_are_those_of_a_wide_range(publisher in publisher(), latencies in latencies(2_000.0)) {
        let found = impossible(&publisher.publish(&latencies));
        prop_assert!(found.is_empty(), "{found:?}");
    }

    #[test]
    fn a_percentile_moved_beyond_its_rounding_is_impossible(
        publisher in publisher(), latencies in latencies(60.0), further in 0u32..20,
    ) {
        let mut population = publisher.publish(&latencies);
        let Some((_, Ok(histogram))) = population.histograms.first() else { unreachable!("made above") };
        let most = histogram.percentile(0.99).labels.high;
        population.tables[0].percentiles[3].1.value = most + 2.0 + f64::from(further);
        let found = impossible(&population);
        prop_assert!(found.iter().any(|each| each.starts_with("percentile: p99")), "{found:?}");
    }

    #[test]
    fn a_deviation_too_small_for_the_maximum_is_impossible(requests in 2u64..100_000, beyond in 1u32..100) {
        // One request alone forces it.
        let least = f64::from(beyond) / ((requests - 1) as f64).sqrt();
        let claim = |value| Some(Claim { value, unit: 1e-6 });
        let table = Table {
            requests,
            mean: claim(1.0),
            max: claim(1.0 + f64::from(beyond)),
            deviation: claim(least * 0.99 - 1e-5),
            ..Table::default()
        };
        let of = |table: Table| impossible(&Population { tables: vec![table], ..Population::default() });
        prop_assert_eq!(of(table.clone()).len(), 1);
        let enough = Table { deviation: claim(least * 1.01), ..table };
        prop_assert_eq!(of(enough), Vec::<String>::new());
    }
}

#[test]
fn each_contradiction_is_told_and_its_neighbour_is_not() {
    let publisher = Publisher {
        values: Rounding::Nearest,
        figures: Rounding::Nearest,
        cuts: true,
        of_labels: true,
        interpolates: false,
        one_less: false,
    };
    let latencies: Vec<f64> = (0..2_000).map(|each| f64::from(1 + each % 9)).collect();
    let honest = publisher.publish(&latencies);
    assert_eq!(impossible(&honest), [""; 0]);
    type Break = fn(&mut Population);
    let broken: [(Break, &str); 8] = [
        (|p| p.tables[0].percentiles[3].1.value = 12.0, "percentile: p99"),
        (|p| p.tables[0].percentiles[0].1.value = 2.0, "percentile: p50"),
        (|p| set(&mut p.tables[0].mean, 8.0), "mean: mean 8"),
        (
            |p| set(&mut p.tables[0].deviation, 0.0),
            "deviation: standard deviation 0",
        ),
        (|p| set(&mut p.tables[0].max, 40.0), "max: max 40"),
        (|p| p.tables[0].percentiles[0].1.value = 30.0, "order: p50 30"),
        (
            |p| p.sums.push(("ranges".to_owned(), 2_000, 1_990)),
            "counts: ranges",
        ),
        (
            |p| {
                let mut other = p.tables[0].clone();
                other.column = "OK".to_owned();
                other.percentiles[3].1.value = 5.0;
                p.tables.push(other);
            },
            "one population: p99",
        ),
    ];
    for (breaks, expected) in broken {
        let mut population = honest.clone();
        breaks(&mut population);
        let found = impossible(&population);
        assert!(
            found.iter().any(|each| each.starts_with(expected)),
            "{expected}: {found:?}"
        );
    }
    let mut short = honest;
    if let Ok(histogram) = &mut short.histograms[0].1 {
        histogram.bins.pop();
    }
    let found = impossible(&short);
    assert!(
        found.len() == 1 && found[0].starts_with("bars: 8 bars"),
        "{found:?}"
    );
}
