//! TLS configurations of the arms: nothing is left to library defaults.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
};

use anyhow::{Context as _, anyhow};
use rustls::{
    ClientConfig, DigitallySignedStruct, NamedGroup, RootCertStore, ServerConfig, SignatureScheme,
    client::{
        ClientSessionStore, Resumption, Tls12ClientSessionValue, Tls13ClientSessionValue,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    crypto::{CryptoProvider, SupportedKxGroup, aws_lc_rs, verify_tls13_signature},
    pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName, UnixTime},
    server::{NoServerSessionStorage, ServerSessionMemoryCache},
};
use serde::{Deserialize, Serialize};

use crate::plan::{
    Arm,
    condition::{CertificateKind, CipherSuite, Condition},
};

/// Name in the certificate and in SNI.
const SERVER_NAME: &str = "pqtail.test";

/// Tickets that one connection gets from a server that hands them out.
pub(super) const TICKETS: usize = 64;

/// Sessions that a server keeps for 0-RTT, whose tickets must not be taken twice: of a whole trial, at any rate a machine can do.
const SESSIONS_MAX: usize = 1 << 17;

/// Early data that a server takes, bytes; the request has less.
const EARLY_DATA_MAX: u32 = 1 << 14;

/// The server's self-signed certificate with its key, made for one run. The key leaves the run's processes
/// nowhere else.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// DER certificate; the client trusts this one alone.
    pub certificate: Vec<u8>,
    /// PKCS#8 DER private key.
    pub key: Vec<u8>,
}

impl Identity {
    /// Makes a new one.
    ///
    /// # Errors
    /// When the system has no randomness to give.
    pub fn generate(kind: CertificateKind) -> anyhow::Result<Self> {
        let algorithm = match kind {
            CertificateKind::EcdsaP256 => &rcgen::PKCS_ECDSA_P256_SHA256,
            CertificateKind::Rsa2048 => &rcgen::PKCS_RSA_SHA256,
            CertificateKind::MlDsa65 => &rcgen::PKCS_ML_DSA_65,
        };
        let make = || {
            let key = rcgen::KeyPair::generate_for(algorithm)?;
            let certificate =
                rcgen::CertificateParams::new(vec![SERVER_NAME.to_owned()])?.self_signed(&key)?;
            Ok::<_, rcgen::Error>(Self {
                certificate: certificate.der().to_vec(),
                key: key.serialize_der(),
            })
        };
        make().with_context(|| format!("make the server's {} certificate", kind.name()))
    }
}

/// One of each kind that a run needs.
pub type Identities = BTreeMap<CertificateKind, Identity>;

/// The DER certificates of [`Identities`].
pub type Certificates = BTreeMap<CertificateKind, Vec<u8>>;

/// Tickets of sessions with one server, each to be used once. The usual store of rustls also remembers the group of the last
/// handshake and sends its share first, which would turn one arm into another.
#[derive(Debug, Default)]
pub struct Tickets(Mutex<Vec<Tls13ClientSessionValue>>);

impl Tickets {
    /// How many there are.
    pub fn count(&self) -> usize {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).len()
    }
}

impl ClientSessionStore for Tickets {
    fn set_kx_hint(&self, _: ServerName<'static>, _: NamedGroup) {}

    fn kx_hint(&self, _: &ServerName<'_>) -> Option<NamedGroup> {
        None
    }

    fn set_tls12_session(&self, _: ServerName<'static>, _: Tls12ClientSessionValue) {}

    fn tls12_session(&self, _: &ServerName<'_>) -> Option<Tls12ClientSessionValue> {
        None
    }

    fn remove_tls12_session(&self, _: &ServerName<'static>) {}

    fn insert_tls13_ticket(&self, _: ServerName<'static>, ticket: Tls13ClientSessionValue) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(ticket);
    }

    fn take_tls13_ticket(&self, _: &ServerName<'static>) -> Option<Tls13ClientSessionValue> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).pop()
    }
}

/// What a connection of an arm must have negotiated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Expected {
    /// IANA number of the group; 0 without TLS.
    pub group: u16,
    /// Whether the server must have asked for another share.
    pub hello_retry: bool,
    /// IANA number of the cipher suite; 0 without TLS.
    pub cipher_suite: u16,
}

type Groups = Vec<&'static dyn SupportedKxGroup>;

/// Groups that the client offers, first the one whose share it sends, and those that the server takes.
fn groups(arm: Arm) -> Option<(Groups, Groups)> {
    use aws_lc_rs::kx_group::{MLKEM768, SECP256R1MLKEM768, X25519, X25519MLKEM768};
    Some(match arm {
        Arm::X25519 => (vec![X25519], vec![X25519]),
        Arm::X25519mlkem768 => (vec![X25519MLKEM768], vec![X25519MLKEM768]),
        Arm::PqOfferedClassicalChosen => (vec![X25519MLKEM768, X25519], vec![X25519]),
        Arm::HelloRetry => (vec![X25519, X25519MLKEM768], vec![X25519MLKEM768]),
        Arm::Secp256r1mlkem768 => (vec![SECP256R1MLKEM768], vec![SECP256R1MLKEM768]),
        Arm::Mlkem768 => (vec![MLKEM768], vec![MLKEM768]),
        Arm::NoCrypto => return None,
    })
}

/// What every connection of this arm is checked against.
#[must_use]
pub fn expected(arm: Arm, condition: &Condition) -> Expected {
    let group = groups(arm).map_or(0, |(_, server)| u16::from(server[0].name()));
    Expected {
        group,
        hello_retry: arm == Arm::HelloRetry,
        cipher_suite: if group == 0 {
            0
        } else {
            condition.cipher_suite.number()
        },
    }
}

/// Why a server that is not ours cannot do an arm.
pub(super) fn no_tls(arm: Arm) -> anyhow::Error {
    anyhow!(
        "the arm {arm} is a plain exchange of bytes that only the embedded server can do: leave it out, or take --server embedded"
    )
}

/// The client's order of cipher suites decides, so `first` is what is negotiated.
fn provider(kx_groups: Groups, first: CipherSuite) -> Arc<CryptoProvider> {
    use aws_lc_rs::cipher_suite::{TLS13_AES_256_GCM_SHA384, TLS13_CHACHA20_POLY1305_SHA256};
    let mut cipher_suites = vec![TLS13_AES_256_GCM_SHA384, TLS13_CHACHA20_POLY1305_SHA256];
    if first == CipherSuite::Chacha20Poly1305Sha256 {
        cipher_suites.reverse();
    }
    Arc::new(CryptoProvider {
        cipher_suites,
        kx_groups,
        ..aws_lc_rs::default_provider()
    })
}

/// The client's side of an arm; `None` where there is no TLS. The server's certificate is verified against `certificate` as the
/// only root; without one it is taken unseen, and only its signature of the handshake is verified. With `tickets` it resumes a
/// session while there are any, and keeps those that it is given.
///
/// # Errors
/// When the certificate is none.
pub fn client_config(
    arm: Arm,
    condition: &Condition,
    certificate: Option<&[u8]>,
    tickets: Option<&Arc<Tickets>>,
) -> anyhow::Result<Option<Arc<ClientConfig>>> {
    let Some((groups, _)) = groups(arm) else {
        return Ok(None);
    };
    let provider = provider(groups, condition.cipher_suite);
    let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(&[&rustls::version::TLS13])?;
    let mut config = match certificate {
        Some(certificate) => {
            let mut roots = RootCertStore::empty();
            roots
                .add(CertificateDer::from(certificate.to_vec()))
                .context("trust the run's certificate")?;
            builder.with_root_certificates(roots)
        }
        None => builder
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(AnyCertificate(provider))),
    }
    .with_no_client_auth();
    config.resumption = match tickets {
        Some(tickets) => Resumption::store(Arc::clone(tickets) as Arc<dyn ClientSessionStore>),
        None => Resumption::disabled(),
    };
    config.enable_early_data = condition.early_data && tickets.is_some();
    Ok(Some(Arc::new(config)))
}

/// Measures a server of somebody else's, who knows whom it is. That it holds its certificate's key is verified all the same, since
/// that is work that every client does.
#[derive(Debug)]
struct AnyCertificate(Arc<CryptoProvider>);

impl ServerCertVerifier for AnyCertificate {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(rustls::Error::General("only TLS 1.3 is offered".to_owned()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.0.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

/// The server's side of an arm under a condition: what serves the measured connections, which get no tickets, and what hands out the
/// tickets that those resume with. `None` where there is no TLS.
///
/// # Errors
/// When the key does not fit the certificate.
pub fn server_configs(
    arm: Arm,
    condition: &Condition,
    identity: &Identity,
) -> anyhow::Result<Option<[Arc<ServerConfig>; 2]>> {
    let Some((_, groups)) = groups(arm) else {
        return Ok(None);
    };
    let certificate = CertificateDer::from(identity.certificate.clone());
    let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(identity.key.clone()));
    let mut config = ServerConfig::builder_with_provider(provider(groups, condition.cipher_suite))
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_no_client_auth()
        .with_single_cert(vec![certificate], key)
        .context("use the run's certificate")?;
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    config.max_early_data_size = 0;
    if condition.early_data {
        // rustls takes early data only where it remembers its sessions, so that no ticket is taken twice.
        config.session_storage = ServerSessionMemoryCache::new(SESSIONS_MAX);
        config.max_early_data_size = EARLY_DATA_MAX;
        config.send_half_rtt_data = true;
    } else if condition.resumed > 0.0 {
        config.ticketer = aws_lc_rs::Ticketer::new().context("make the key of session tickets")?;
    }
    let mut generous = config.clone();
    generous.send_tls13_tickets = TICKETS;
    Ok(Some([Arc::new(config), Arc::new(generous)]))
}

/// The name that the client asks for.
#[must_use]
pub fn server_name() -> ServerName<'static> {
    ServerName::try_from(SERVER_NAME).expect("a valid name")
}
