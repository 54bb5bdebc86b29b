//! TLS configurations of the arms: nothing is left to library defaults.

use std::sync::Arc;

use anyhow::{Context as _, anyhow};
use rustls::{
    ClientConfig, DigitallySignedStruct, RootCertStore, ServerConfig, SignatureScheme,
    client::{
        Resumption,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    crypto::{CryptoProvider, SupportedKxGroup, aws_lc_rs, verify_tls13_signature},
    pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName, UnixTime},
    server::NoServerSessionStorage,
};
use serde::{Deserialize, Serialize};

use crate::plan::Arm;

/// Name in the certificate and in SNI.
const SERVER_NAME: &str = "pqtail.test";

/// The server's self-signed ECDSA P-256 certificate with its key, made for one run. The key leaves the run's processes
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
    pub fn generate() -> anyhow::Result<Self> {
        let made = rcgen::generate_simple_self_signed(vec![SERVER_NAME.to_owned()])
            .context("make the server's certificate")?;
        Ok(Self {
            certificate: made.cert.der().to_vec(),
            key: made.signing_key.serialize_der(),
        })
    }
}

/// What a connection of an arm must have negotiated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Expected {
    /// IANA number of the group; 0 without TLS.
    pub group: u16,
    /// Whether the server must have asked for another share.
    pub hello_retry: bool,
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
pub fn expected(arm: Arm) -> Expected {
    let group = groups(arm).map_or(0, |(_, server)| u16::from(server[0].name()));
    Expected {
        group,
        hello_retry: arm == Arm::HelloRetry,
    }
}

/// Why a server that is not ours cannot do an arm.
pub(super) fn no_tls(arm: Arm) -> anyhow::Error {
    anyhow!(
        "the arm {arm} is a plain exchange of bytes that only the embedded server can do: leave it out, or take --server embedded"
    )
}

fn provider(kx_groups: Groups) -> Arc<CryptoProvider> {
    use aws_lc_rs::cipher_suite::{TLS13_AES_256_GCM_SHA384, TLS13_CHACHA20_POLY1305_SHA256};
    let cipher_suites = vec![TLS13_AES_256_GCM_SHA384, TLS13_CHACHA20_POLY1305_SHA256];
    Arc::new(CryptoProvider {
        cipher_suites,
        kx_groups,
        ..aws_lc_rs::default_provider()
    })
}

/// The client's side of an arm; `None` where there is no TLS. The server's certificate is verified against `certificate` as the
/// only root; without one it is taken unseen, and only its signature of the handshake is verified.
///
/// # Errors
/// When the certificate is none.
pub fn client_config(arm: Arm, certificate: Option<&[u8]>) -> anyhow::Result<Option<Arc<ClientConfig>>> {
    let Some((groups, _)) = groups(arm) else {
        return Ok(None);
    };
    let provider = provider(groups);
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
    config.resumption = Resumption::disabled();
    config.enable_early_data = false;
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

/// The server's side of an arm; `None` where there is no TLS.
///
/// # Errors
/// When the key does not fit the certificate.
pub fn server_config(arm: Arm, identity: &Identity) -> anyhow::Result<Option<Arc<ServerConfig>>> {
    let Some((_, groups)) = groups(arm) else {
        return Ok(None);
    };
    let certificate = CertificateDer::from(identity.certificate.clone());
    let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(identity.key.clone()));
    let mut config = ServerConfig::builder_with_provider(provider(groups))
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_no_client_auth()
        .with_single_cert(vec![certificate], key)
        .context("use the run's certificate")?;
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    config.max_early_data_size = 0;
    Ok(Some(Arc::new(config)))
}

/// The name that the client asks for.
#[must_use]
pub fn server_name() -> ServerName<'static> {
    ServerName::try_from(SERVER_NAME).expect("a valid name")
}
