//! Two host clocks onto one, with a stated error bound.
//!
//! Each handshake stamps four packet times: SYN out and SYN-ACK in on the client, SYN in and SYN-ACK out on the server. No
//! packet arrives before it was sent, so theta = server clock - client clock is bounded from both sides by every
//! handshake: `synack_out - synack_in <= theta <= syn_in - syn_out`. A line theta(t) = a + b t is laid between the two
//! envelopes with the greatest margin (the linear programme of Moon, Skelly and Towsley, INFOCOM 1999); the bound covers
//! every line that violates no packet's causality, and with it any asymmetry of the path.

use crate::clock::{HostNs, RunNs};

/// The four packet times of one handshake without retransmissions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exchange {
    /// SYN leaves the client; client clock.
    pub syn_out: HostNs,
    /// SYN arrives at the server; server clock.
    pub syn_in: HostNs,
    /// SYN-ACK leaves the server; server clock.
    pub synack_out: HostNs,
    /// SYN-ACK arrives at the client; client clock.
    pub synack_in: HostNs,
}

/// How to turn server times into run times over one trial.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Alignment {
    /// Handshakes used.
    pub handshakes: u64,
    /// Middle of the fitted stretch, client clock, ns.
    reference_ns: u64,
    /// Server minus client clock at the reference, ns: whole part, kept apart so that no precision is lost.
    offset_ns: i64,
    /// Rest of the offset, ns.
    offset_rest_ns: f64,
    /// Server ns gained per client ns.
    drift: f64,
    /// The truth lies within this of [`Alignment::offset_at`] anywhere in the trial, ns.
    pub error_ns: u64,
}

/// Steepest drift considered, ns per ns: 200 ppm is worse than any quartz in service.
const DRIFT_MAX: f64 = 200e-6;

/// Halvings of the drift's search range: 200 ppm / 2^60 over an hour is far below a nanosecond.
const SEARCH_STEPS: u32 = 90;

struct Bounds {
    /// Client time from the reference, ns, and the least theta it allows.
    lower: Vec<(f64, f64)>,
    /// The same with the greatest theta.
    upper: Vec<(f64, f64)>,
}

impl Bounds {
    /// Least `a` that a line of this drift may have.
    fn floor(&self, drift: f64) -> f64 {
        self.lower
            .iter()
            .map(|(at, theta)| theta - drift * at)
            .fold(f64::NEG_INFINITY, f64::max)
    }

    /// Greatest such `a`.
    fn ceiling(&self, drift: f64) -> f64 {
        self.upper
            .iter()
            .map(|(at, theta)| theta - drift * at)
            .fold(f64::INFINITY, f64::min)
    }
}

/// Finds the alignment; `None` without a single clean handshake, or if no line satisfies causality (the clock was set or the
/// records are damaged).
#[must_use]
pub fn align(exchanges: &[Exchange]) -> Option<Alignment> {
    let first = exchanges.iter().map(|each| each.syn_out).min()?;
    let last = exchanges.iter().map(|each| each.syn_out).max()?;
    let reference_ns = first.0 + (last - first).cast_unsigned() / 2;
    let sample = exchanges
        .iter()
        .min_by_key(|each| each.synack_in - each.syn_out)?;
    let offset_ns = sample.syn_in - sample.syn_out;
    let point = |at: HostNs, theta: i64| {
        (
            (at - HostNs(reference_ns)) as f64,
            theta.wrapping_sub(offset_ns) as f64,
        )
    };
    let bounds = Bounds {
        lower: hull(
            exchanges
                .iter()
                .map(|x| point(x.synack_in, x.synack_out - x.synack_in))
                .collect(),
            1.0,
        ),
        upper: hull(
            exchanges
                .iter()
                .map(|x| point(x.syn_out, x.syn_in - x.syn_out))
                .collect(),
            -1.0,
        ),
    };
    let drift = maximize(-DRIFT_MAX, DRIFT_MAX, |b| bounds.ceiling(b) - bounds.floor(b));
    let (floor, ceiling) = (bounds.floor(drift), bounds.ceiling(drift));
    if floor > ceiling {
        return None;
    }
    let offset_rest_ns = f64::midpoint(floor, ceiling);
    let feasible = |b: f64| bounds.ceiling(b) >= bounds.floor(b);
    let (steepest_down, steepest_up) = (
        last_feasible(drift, -DRIFT_MAX, feasible),
        last_feasible(drift, DRIFT_MAX, feasible),
    );
    let error_at = |at: f64| {
        let up = maximize(steepest_down, steepest_up, |b| bounds.ceiling(b) + b * at);
        let down = maximize(steepest_down, steepest_up, |b| -(bounds.floor(b) + b * at));
        let here = offset_rest_ns + drift * at;
        let highest = bounds.ceiling(up) + up * at;
        let lowest = bounds.floor(down) + down * at;
        (highest - here).max(here - lowest)
    };
    let half = (last - first) as f64 / 2.0;
    let error = error_at(-half).max(error_at(half)).max(0.0);
    Some(Alignment {
        handshakes: exchanges.len() as u64,
        reference_ns,
        offset_ns,
        offset_rest_ns,
        drift,
        error_ns: error.ceil() as u64 + 1,
    })
}

/// Only hull points can bind: the upper hull of the lower bounds (`side` 1), the lower hull of the upper ones (`side` -1).
fn hull(mut points: Vec<(f64, f64)>, side: f64) -> Vec<(f64, f64)> {
    points.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1)));
    let mut hull: Vec<(f64, f64)> = Vec::new();
    for point in points {
        while let [.., a, b] = hull[..] {
            let turn = (b.0 - a.0) * (point.1 - a.1) - (b.1 - a.1) * (point.0 - a.0);
            if side * turn < 0.0 {
                break;
            }
            hull.pop();
        }
        hull.push(point);
    }
    hull
}

/// Where a concave function is greatest.
fn maximize(mut low: f64, mut high: f64, f: impl Fn(f64) -> f64) -> f64 {
    for _ in 0..SEARCH_STEPS {
        let (left, right) = (low + (high - low) / 3.0, high - (high - low) / 3.0);
        if f(left) < f(right) {
            low = left;
        } else {
            high = right;
        }
    }
    f64::midpoint(low, high)
}

/// The last point from `inside` towards `limit` where the predicate still holds.
fn last_feasible(mut inside: f64, limit: f64, feasible: impl Fn(f64) -> bool) -> f64 {
    if feasible(limit) {
        return limit;
    }
    let mut outside = limit;
    for _ in 0..SEARCH_STEPS {
        let middle = f64::midpoint(inside, outside);
        if feasible(middle) {
            inside = middle;
        } else {
            outside = middle;
        }
    }
    inside
}

impl Alignment {
    /// The two ends share a clock and no records say more: the identity, without error.
    #[must_use]
    pub const fn identity() -> Self {
        Self {
            handshakes: 0,
            reference_ns: 0,
            offset_ns: 0,
            offset_rest_ns: 0.0,
            drift: 0.0,
            error_ns: 0,
        }
    }

    /// Server clock minus client clock at a client time, ns.
    #[must_use]
    pub fn offset_at(&self, client: HostNs) -> i64 {
        let rest = self.offset_rest_ns + self.drift * (client - HostNs(self.reference_ns)) as f64;
        self.offset_ns + rest.round() as i64
    }

    /// Server clock minus client clock in the middle of the trial, ns.
    #[must_use]
    pub fn offset_ns(&self) -> i64 {
        self.offset_ns + self.offset_rest_ns.round() as i64
    }

    /// Drift, ns gained by the server's clock per second.
    #[must_use]
    pub fn drift_ns_per_s(&self) -> f64 {
        self.drift * 1e9
    }

    /// A client time on the run's clock: the same number.
    #[must_use]
    pub fn client(at: HostNs) -> RunNs {
        RunNs(at.0.cast_signed())
    }

    /// A server time on the run's clock.
    #[must_use]
    pub fn server(&self, at: HostNs) -> RunNs {
        // theta is a function of client time; the error of taking it at server time less the offset is drift squared.
        let guess = HostNs(at.0.wrapping_sub(self.offset_ns.cast_unsigned()));
        RunNs(
            at.0.wrapping_sub(self.offset_at(guess).cast_unsigned())
                .cast_signed(),
        )
    }

    /// A run time on the server's clock.
    #[must_use]
    pub fn to_server(&self, at: RunNs) -> HostNs {
        let client = HostNs(at.0.cast_unsigned());
        HostNs(client.0.wrapping_add(self.offset_at(client).cast_unsigned()))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// One exchange under a true offset and drift, with one-way delays of its own.
    fn exchange(at_ns: u64, offset_ns: i64, drift: f64, there_ns: u64, back_ns: u64) -> Exchange {
        let server = |client: u64| {
            HostNs(client.wrapping_add((offset_ns + (drift * client as f64).round() as i64).cast_unsigned()))
        };
        Exchange {
            syn_out: HostNs(at_ns),
            syn_in: server(at_ns + there_ns),
            synack_out: server(at_ns + there_ns + 5_000),
            synack_in: HostNs(at_ns + there_ns + 5_000 + back_ns),
        }
    }

    #[test]
    fn no_handshake_no_alignment() {
        assert_eq!(align(&[]), None);
    }

    #[test]
    fn broken_causality_is_no_alignment() {
        let mut early = exchange(1_000_000, 0, 0.0, 10_000, 10_000);
        let late = exchange(1_000_100, 5_000_000, 0.0, 10_000, 10_000);
        early.synack_in = HostNs(early.synack_in.0);
        assert_eq!(align(&[early, late]), None);
    }

    proptest! {
        #[test]
        fn the_truth_lies_within_the_bound(
            offset in -4_000_000_000_000i64..4_000_000_000_000,
            drift_ppm in -50.0f64..50.0,
            delays in prop::collection::vec((1_000u64..400_000, 1_000u64..400_000), 2..200),
        ) {
            let drift = drift_ppm * 1e-6;
            let begin = 5_000_000_000_000u64;
            let exchanges: Vec<_> = delays.iter().enumerate()
                .map(|(i, &(there, back))| exchange(begin + i as u64 * 50_000_000, offset, drift, there, back))
                .collect();
            let found = align(&exchanges).expect("consistent by construction");
            for x in &exchanges {
                let truth = offset + (drift * x.syn_out.0 as f64).round() as i64;
                let error = (found.offset_at(x.syn_out) - truth).unsigned_abs();
                prop_assert!(error <= found.error_ns + 2, "error {error} above the bound {}", found.error_ns);
                // No packet may arrive before it left.
                prop_assert!(found.server(x.syn_in).0 >= Alignment::client(x.syn_out).0 - 2);
                prop_assert!(Alignment::client(x.synack_in).0 >= found.server(x.synack_out).0 - 2);
            }
        }

        #[test]
        fn shifting_the_server_clock_changes_nothing_but_the_offset(
            shift in -1_000_000_000_000i64..1_000_000_000_000,
            delays in prop::collection::vec((1_000u64..400_000, 1_000u64..400_000), 2..50),
        ) {
            let make = |offset: i64| -> Vec<_> {
                delays.iter().enumerate()
                    .map(|(i, &(there, back))| exchange(7_000_000_000_000 + i as u64 * 50_000_000, offset, 0.0, there, back))
                    .collect()
            };
            let (plain, shifted) = (align(&make(0)).unwrap(), align(&make(shift)).unwrap());
            prop_assert!((shifted.offset_ns() - plain.offset_ns() - shift).abs() <= 1);
            prop_assert!(shifted.error_ns.abs_diff(plain.error_ns) <= 1);
        }
    }
}
