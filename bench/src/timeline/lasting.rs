//! Stretches of time of any kind: cut to what is asked for, and kept from overlapping.

/// Something that lasts, ns on its machine's clock.
pub(crate) trait Lasting: Copy {
    /// Its begin and its end.
    fn times(&mut self) -> (&mut u64, &mut u64);
}

fn times(mut each: impl Lasting) -> (u64, u64) {
    let (start_ns, end_ns) = each.times();
    (*start_ns, *end_ns)
}

/// The part of sorted, disjoint stretches between two times, the first and last cut to fit.
pub(crate) fn clipped<T: Lasting>(
    stretches: Option<&Vec<T>>,
    from_ns: u64,
    to_ns: u64,
) -> impl Iterator<Item = T> {
    let stretches = stretches.map_or(&[][..], Vec::as_slice);
    let first = stretches.partition_point(|&each| times(each).1 <= from_ns);
    stretches[first..]
        .iter()
        .copied()
        .take_while(move |&each| times(each).0 < to_ns)
        .map(move |mut each| {
            let (start_ns, end_ns) = each.times();
            (*start_ns, *end_ns) = ((*start_ns).max(from_ns), (*end_ns).min(to_ns));
            each
        })
        .filter(|&each| {
            let (start_ns, end_ns) = times(each);
            start_ns < end_ns
        })
}

/// Sorts stretches and lets the earlier of two that overlap have the common part.
pub(crate) fn disjoint<T: Lasting>(stretches: &mut Vec<T>) {
    stretches.sort_by_key(|&each| times(each));
    let mut taken_ns = 0;
    stretches.retain_mut(|each| {
        let (start_ns, end_ns) = each.times();
        *start_ns = (*start_ns).max(taken_ns);
        taken_ns = taken_ns.max(*end_ns);
        *start_ns < *end_ns
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Lasting for (u64, u64) {
        fn times(&mut self) -> (&mut u64, &mut u64) {
            (&mut self.0, &mut self.1)
        }
    }

    #[test]
    fn the_earlier_has_what_two_share_and_the_ends_are_cut() {
        let mut stretches = vec![(30, 40), (10, 20), (12, 18), (15, 25)];
        disjoint(&mut stretches);
        assert_eq!(stretches, [(10, 20), (20, 25), (30, 40)]);
        let between: Vec<_> = clipped(Some(&stretches), 15, 32).collect();
        assert_eq!(between, [(15, 20), (20, 25), (30, 32)]);
        assert_eq!(clipped(Some(&stretches), 25, 30).count(), 0);
        assert_eq!(clipped::<(u64, u64)>(None, 0, 50).count(), 0);
    }
}
