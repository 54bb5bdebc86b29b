//! What two hosts cost at most.

/// On-demand list prices of Linux in eu-central-1, US dollars an hour, written down from memory of the provider's list on
/// 2 December 2026 and not looked up: an order of magnitude, not an offer. Spot costs at most that.
const USD_PER_HOUR: [(&str, f64); 3] = [
    ("c7g.large", 0.0831),
    ("c7i.large", 0.1018),
    ("c6a.large", 0.0873),
];

/// Root volume and public address of one host, US dollars an hour: 20 GB of gp3 and one IPv4 address, rounded up.
const USD_PER_HOUR_BESIDES: f64 = 0.01;

/// What these instances cost an hour and over their time to live.
pub(super) fn sentence(types: &[&str], ttl_minutes: u64) -> String {
    let mut usd_per_hour = 0.0;
    for wanted in types {
        match USD_PER_HOUR.iter().find(|(known, _)| known == wanted) {
            Some((_, usd)) => usd_per_hour += usd + USD_PER_HOUR_BESIDES,
            None => {
                return format!(
                    "  cost: unknown, {wanted} is not in this program's list; see the provider's. Traffic to the internet is extra"
                );
            }
        }
    }
    let hours = ttl_minutes as f64 / 60.0;
    format!(
        "  cost: about {usd_per_hour:.2} USD an hour and {:.2} USD over {hours:.1} h if on demand in eu-central-1; spot is at most \
         that; traffic to the internet is extra",
        usd_per_hour * hours
    )
}

#[cfg(test)]
mod tests {
    use super::sentence;

    #[test]
    fn two_known_hosts_have_a_price_and_an_unknown_one_has_none() {
        let text = sentence(&["c7g.large", "c7g.large"], 120);
        assert!(
            text.contains("0.19 USD an hour and 0.37 USD over 2.0 h"),
            "{text}"
        );
        assert!(sentence(&["c7g.large", "x9.huge"], 120).contains("unknown, x9.huge"));
    }
}
