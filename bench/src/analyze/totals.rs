//! What a thread's time went to since the begin of a trial, so that a long wait for it costs one subtraction.
//!
//! In an overloaded run thousands of requests wait for the same thread at the same time, each for seconds. Told one by one,
//! each wait is a walk over everything that the thread did meanwhile.

use crate::{
    attribute::{
        ledger::{Ledger, Line},
        split::Charge,
    },
    clock::RunNs,
};

/// Charges of one thread's time as those see it that wait for it, in order of time.
#[derive(Debug, Default)]
pub(super) struct Totals {
    pieces: Vec<Piece>,
    /// The sum of the first [`PIECES_PER_MARK`] pieces, of twice as many, and so on, from none.
    marks: Vec<Sum>,
}

#[derive(Clone, Copy, Debug)]
struct Piece {
    charge: Charge,
    is_environment: bool,
}

/// Time by line, and that of it which is the environment's doing, ns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Sum {
    pub(super) ledger: Ledger,
    pub(super) environment_ns: u64,
}

/// Pieces that are added up at each look; a sum takes the room of five pieces.
const PIECES_PER_MARK: usize = 64;

impl Sum {
    pub(super) fn add(&mut self, line: Line, ns: u64, is_environment: bool) {
        self.ledger.charge(line, ns);
        self.environment_ns += if is_environment { ns } else { 0 };
    }
}

impl Totals {
    /// Takes in the next piece; one that begins before the last has ended is no piece of one thread's time.
    pub(super) fn push(&mut self, charge: Charge, is_environment: bool) {
        if self.pieces.len().is_multiple_of(PIECES_PER_MARK) {
            let mut sum = self.marks.last().copied().unwrap_or_default();
            let before = self.pieces.len().saturating_sub(PIECES_PER_MARK);
            for piece in &self.pieces[before..] {
                sum.add(piece.charge.line, piece.charge.ns, piece.is_environment);
            }
            self.marks.push(sum);
        }
        self.pieces.push(Piece {
            charge,
            is_environment,
        });
    }

    /// What lies between two times.
    pub(super) fn between(&self, from: RunNs, to: RunNs) -> Sum {
        let (before, mut sum) = (self.until(from), self.until(to));
        let mut ledger = Ledger::default();
        for (line, ns) in sum.ledger.lines() {
            ledger.charge(line, ns - before.ledger.ns(line));
        }
        sum.ledger = ledger;
        sum.environment_ns -= before.environment_ns;
        sum
    }

    fn until(&self, to: RunNs) -> Sum {
        let count = self.pieces.partition_point(|piece| piece.charge.start < to);
        let mark = count.saturating_sub(1) / PIECES_PER_MARK;
        let mut sum = self.marks.get(mark).copied().unwrap_or_default();
        for piece in self.pieces.get(mark * PIECES_PER_MARK..count).unwrap_or_default() {
            let elapsed_ns = (to - piece.charge.start).cast_unsigned();
            let ns = elapsed_ns.min(piece.charge.ns);
            sum.add(piece.charge.line, ns, piece.is_environment);
        }
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attribute::{
        ledger::{Side, ThreadLine},
        split::Detail,
    };

    #[test]
    fn a_stretch_holds_what_its_pieces_hold() {
        let lines = [ThreadLine::Compute, ThreadLine::OtherWork, ThreadLine::RunQueue]
            .map(|line| Line::Thread(Side::Client, line));
        let mut totals = Totals::default();
        // 10 ns of each line in turn, with 5 ns between that nobody knows.
        for number in 0..1_000 {
            let charge = Charge {
                line: lines[number % 3],
                start: RunNs(15 * number as i64),
                ns: 10,
                cpu: None,
                detail: Detail::Nobody,
            };
            totals.push(charge, number % 3 == 2);
        }
        for (from, to) in [
            (0, 15_000),
            (0, 1),
            (7, 7),
            (3, 19),
            (14, 15),
            (900, 9_999),
            (-5, 20_000),
        ] {
            let mut expected = Sum::default();
            for number in 0..1_000i64 {
                let (begin, end) = ((15 * number).max(from), (15 * number + 10).min(to));
                let ns = (end - begin).max(0).cast_unsigned();
                expected.add(lines[number as usize % 3], ns, number % 3 == 2);
            }
            assert_eq!(totals.between(RunNs(from), RunNs(to)), expected, "{from} to {to}");
        }
    }
}
