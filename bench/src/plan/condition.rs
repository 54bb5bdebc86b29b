//! What a scenario varies besides the arms: the exchange, the load and the path.

use anyhow::ensure;
use serde::{Deserialize, Serialize};

use super::Arm;

/// A response has at least this many bytes, which is what the default response has.
pub const RESPONSE_BYTES_MIN: u32 = 3;

/// More would not be a response of a handshake benchmark, and each server worker holds one in memory.
pub const RESPONSE_BYTES_MAX: u32 = 100_000_000;

/// More requests on one connection would make the handshake disappear, and the record of a connection's packets too.
pub const REQUESTS_MAX: u32 = 1_000;

/// More connections need more ports than a client has.
pub const HELD_MAX: u32 = 20_000;

/// The least maximum segment size that Linux lets a socket ask for (`TCP_MIN_MSS`), and the greatest.
pub const MSS: (u16, u16) = (88, 32_767);

/// With more loss than this hardly any exchange ends within its time-out.
pub const LOSS_MAX: f64 = 0.5;

/// More added computing than this would be the whole of an exchange, ns.
pub const EXTRA_NS_MAX: u64 = 1_000_000_000;

/// One setting of all that can be varied. The default asks for nothing out of the ordinary.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Condition {
    /// Arms under this condition, the first being the baseline; the plan's if `None`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub arms: Option<Vec<Arm>>,
    /// Requests (connections) per second; the plan's if `None`.
    pub rate_hz: Option<f64>,
    /// Bytes of a response's body.
    pub response_bytes: u32,
    /// Requests one after another on each connection. A connection is one sample, however many it has.
    pub requests_per_connection: u32,
    /// Share of connections, 0 to 1, that resume an earlier session, by a pre-shared key with a fresh (EC)DHE or KEM exchange.
    pub resumed: f64,
    /// Whether those send their request as early data (0-RTT).
    pub early_data: bool,
    /// Connections that are held open all the while, besides those that are measured.
    pub held_connections: u32,
    /// Requests per second over all held connections; not measured.
    pub held_rate_hz: f64,
    /// Which cipher suite the client puts first, so that it is chosen; both are offered.
    pub cipher_suite: CipherSuite,
    /// What the server proves itself with.
    pub certificate: CertificateKind,
    /// Maximum segment size of both directions, bytes; that of the path if `None`.
    pub mss: Option<u16>,
    /// Share of segments, 0 to 1, that are lost in each direction on arrival.
    pub loss: f64,
    /// Computing that the server adds to each handshake, ns: a known effect, to prove that it is found.
    pub server_extra_ns: u64,
}

impl Default for Condition {
    fn default() -> Self {
        Self {
            arms: None,
            rate_hz: None,
            response_bytes: RESPONSE_BYTES_MIN,
            requests_per_connection: 1,
            resumed: 0.0,
            early_data: false,
            held_connections: 0,
            held_rate_hz: 0.0,
            cipher_suite: CipherSuite::default(),
            certificate: CertificateKind::default(),
            mss: None,
            loss: 0.0,
            server_extra_ns: 0,
        }
    }
}

/// A cipher suite of TLS 1.3.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CipherSuite {
    /// `TLS_AES_256_GCM_SHA384`.
    #[default]
    Aes256GcmSha384,
    /// `TLS_CHACHA20_POLY1305_SHA256`.
    Chacha20Poly1305Sha256,
}

impl CipherSuite {
    /// As reports and paths name it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Aes256GcmSha384 => "aes256",
            Self::Chacha20Poly1305Sha256 => "chacha20",
        }
    }

    /// IANA number.
    #[must_use]
    pub const fn number(self) -> u16 {
        match self {
            Self::Aes256GcmSha384 => 0x1302,
            Self::Chacha20Poly1305Sha256 => 0x1303,
        }
    }
}

/// The algorithm of a certificate's key and of its signatures.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CertificateKind {
    /// ECDSA on P-256.
    #[default]
    EcdsaP256,
    /// RSA with 2,048 bits.
    #[serde(rename = "rsa-2048")]
    Rsa2048,
    /// ML-DSA-65 (FIPS 204).
    #[serde(rename = "ml-dsa-65")]
    MlDsa65,
}

impl CertificateKind {
    /// As scenarios, reports and paths name it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::EcdsaP256 => "ecdsa-p256",
            Self::Rsa2048 => "rsa-2048",
            Self::MlDsa65 => "ml-dsa-65",
        }
    }
}

impl Condition {
    /// Checks what a scenario or a manifest may hold, for the arms that run under it.
    ///
    /// # Errors
    /// Names the first value that makes no condition, and what would.
    pub fn validate(&self, arms: &[Arm]) -> anyhow::Result<()> {
        ensure!(
            !arms.is_empty(),
            "a condition has no arms: name some, or leave `arms` out for the plan's"
        );
        let within = |name: &str, value: u32, least: u32, most: u32| {
            ensure!(
                (least..=most).contains(&value),
                "{name} is {value}: it must be {least} to {most}"
            );
            Ok(())
        };
        within(
            "response-bytes",
            self.response_bytes,
            RESPONSE_BYTES_MIN,
            RESPONSE_BYTES_MAX,
        )?;
        within(
            "requests-per-connection",
            self.requests_per_connection,
            1,
            REQUESTS_MAX,
        )?;
        within("held-connections", self.held_connections, 0, HELD_MAX)?;
        if let Some(mss) = self.mss {
            within("mss", mss.into(), MSS.0.into(), MSS.1.into())?;
        }
        for (name, share, most) in [("resumed", self.resumed, 1.0), ("loss", self.loss, LOSS_MAX)] {
            ensure!(
                (0.0..=most).contains(&share),
                "{name} is {share}: it is a share of 1, from 0 to {most}"
            );
        }
        ensure!(
            self.held_rate_hz.is_finite() && self.held_rate_hz >= 0.0,
            "held-rate is {}: it must be 0 or more requests per second",
            self.held_rate_hz
        );
        ensure!(
            self.held_rate_hz == 0.0 || self.held_connections > 0,
            "held-rate needs connections to send on: set held-connections"
        );
        ensure!(
            self.server_extra_ns <= EXTRA_NS_MAX,
            "the server adds {} ns to each handshake: it must be {EXTRA_NS_MAX} at most",
            self.server_extra_ns
        );
        ensure!(
            !self.early_data || self.resumed > 0.0,
            "early-data needs a session to resume: set resumed above 0"
        );
        ensure!(
            self.resumed == 0.0 || !arms.contains(&Arm::HelloRetry),
            "resumed and the arm hello-retry exclude each other: whether a resumed handshake had a HelloRetryRequest is not told, so \
             it could not be checked"
        );
        let plain = Self {
            arms: self.arms.clone(),
            rate_hz: self.rate_hz,
            mss: self.mss,
            loss: self.loss,
            ..Self::default()
        };
        ensure!(
            !arms.contains(&Arm::NoCrypto) || *self == plain,
            "the arm no-crypto imitates the default exchange byte by byte: under this condition leave it out (`arms`)"
        );
        Ok(())
    }

    /// One word for every setting, in a fixed order, so that conditions can be named by those in which they differ. Each is safe in
    /// a path; one may be empty. `rate_hz` is the plan's.
    pub(crate) fn words(&self, rate_hz: f64) -> Vec<String> {
        let percent = |share: f64| format!("{}", (share * 1e6).round() / 1e4);
        vec![
            format!("{}ps", self.rate_hz.unwrap_or(rate_hz)),
            bytes(self.response_bytes),
            format!("{}req", self.requests_per_connection),
            format!("resumed{}", percent(self.resumed)),
            if self.early_data { "0rtt" } else { "" }.to_owned(),
            format!("held{}", self.held_connections),
            format!("held{}ps", self.held_rate_hz),
            self.cipher_suite.name().to_owned(),
            self.certificate.name().to_owned(),
            self.mss.map_or(String::new(), |mss| format!("mss{mss}")),
            format!("loss{}", percent(self.loss)),
            format!("extra{}us", self.server_extra_ns as f64 / 1e3),
        ]
    }
}

/// What each of a plan's conditions is called, by what tells it from the others: `10KB-resumed50`. Empty where it is the only one. Safe
/// in paths and shells. `rate_hz` is the plan's.
#[must_use]
pub fn names(conditions: &[Condition], rate_hz: f64) -> Vec<String> {
    let all: Vec<_> = conditions
        .iter()
        .map(|condition| condition.words(rate_hz))
        .collect();
    let name = |own: &Vec<String>| {
        let varied = (0..own.len()).filter(|&word| all.iter().any(|words| words[word] != own[word]));
        let words = varied
            .map(|word| own[word].as_str())
            .filter(|word| !word.is_empty());
        match words.collect::<Vec<_>>().as_slice() {
            [] if all.len() > 1 => "usual".to_owned(),
            words => words.join("-"),
        }
    };
    all.iter().map(name).collect()
}

fn bytes(count: u32) -> String {
    match count {
        1_000_000.. if count.is_multiple_of(1_000_000) => format!("{}MB", count / 1_000_000),
        1_000.. if count.is_multiple_of(1_000) => format!("{}KB", count / 1_000),
        _ => format!("{count}B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_makes_no_condition_is_refused_by_name() {
        type Break = fn(&mut Condition);
        let broken: [(Break, &str); 8] = [
            (|c| c.response_bytes = 2, "response-bytes"),
            (|c| c.requests_per_connection = 0, "requests-per-connection"),
            (|c| c.resumed = 1.5, "resumed"),
            (|c| c.loss = f64::NAN, "loss"),
            (|c| c.mss = Some(20), "mss"),
            (|c| c.held_rate_hz = 5.0, "held-connections"),
            (|c| c.early_data = true, "resumed above 0"),
            (|c| c.arms = Some(vec![]), "arms"),
        ];
        let arms = [Arm::X25519];
        assert!(Condition::default().validate(&arms).is_ok());
        for (breaks, word) in broken {
            let mut condition = Condition::default();
            breaks(&mut condition);
            let arms = condition.arms.clone().unwrap_or(arms.to_vec());
            let error = condition.validate(&arms).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
    }

    #[test]
    fn the_control_without_tls_takes_no_condition_of_tls() {
        let arms = [Arm::X25519, Arm::NoCrypto];
        let lossy = Condition {
            loss: 0.01,
            ..Condition::default()
        };
        assert!(lossy.validate(&arms).is_ok());
        let longer = Condition {
            response_bytes: 10,
            ..Condition::default()
        };
        assert!(longer.validate(&arms).is_err());
    }
}
