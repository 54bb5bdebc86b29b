//! `hosts.toml`: which two machines a run uses, and how SSH reaches them.
//!
//! ```toml
//! [client]
//! ssh = "ubuntu@203.0.113.7"   # as `ssh` takes it
//! port = 22                    # of sshd
//! identity = "id_ed25519"      # private key; without it those that ssh offers by itself
//! known_hosts = "known_hosts"  # where host keys are pinned; without it `hosts.known` beside this file
//! address = "10.0.0.10"        # of the measured path
//! [server]
//! ssh = "ubuntu@203.0.113.8"
//! address = "10.0.0.11"
//! nginx = "/opt/nginx/sbin/nginx"   # what `--server nginx` starts there
//! ```
//!
//! Paths are taken from the folder in which the file lies.

use std::{
    fs,
    net::IpAddr,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, ensure};
use serde::{Deserialize, Serialize};

/// The port of sshd where none is named.
const SSH_PORT: u16 = 22;

/// The two machines of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Inventory {
    /// Where the load generator runs.
    pub client: Reach,
    /// Where the server runs.
    pub server: Reach,
}

/// How one machine is reached.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reach {
    /// Destination as `ssh` takes it: `user@host`, or a name from the user's own configuration.
    pub ssh: String,
    /// Port of sshd.
    #[serde(default = "ssh_port")]
    pub port: u16,
    /// Private key; absent, those that ssh offers by itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identity: Option<PathBuf>,
    /// File of pinned host keys: a key that is not in it is added at first contact, another one later is refused.
    #[serde(default = "known_hosts")]
    pub known_hosts: PathBuf,
    /// Its address on the measured path.
    pub address: IpAddr,
    /// nginx on this machine, for `--server nginx`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nginx: Option<PathBuf>,
}

const fn ssh_port() -> u16 {
    SSH_PORT
}

fn known_hosts() -> PathBuf {
    PathBuf::from("hosts.known")
}

impl Inventory {
    /// Reads an inventory; its paths become absolute.
    ///
    /// # Errors
    /// When there is none, or it is not understood: then with line and column.
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let text = fs::read_to_string(path)
            .with_context(|| format!("read {}: --hosts names a file such as hosts.toml", path.display()))?;
        let folder = std::path::absolute(path)?;
        let folder = folder.parent().context("an inventory lies in a folder")?;
        Self::parse(&text, folder).with_context(|| format!("{} is no inventory of hosts", path.display()))
    }

    fn parse(text: &str, folder: &Path) -> anyhow::Result<Self> {
        let mut inventory: Self = toml::from_str(text)?;
        for (name, host) in [
            ("client", &mut inventory.client),
            ("server", &mut inventory.server),
        ] {
            // ssh would take it for an option.
            ensure!(
                !host.ssh.is_empty() && !host.ssh.starts_with('-'),
                "[{name}] ssh = '{}': give user@host",
                host.ssh
            );
            host.known_hosts = folder.join(&host.known_hosts);
            if let Some(identity) = &mut host.identity {
                *identity = folder.join(&identity);
                ensure!(
                    identity.is_file(),
                    "[{name}] identity: there is no file {}",
                    identity.display()
                );
            }
        }
        let (client, server) = (inventory.client.address, inventory.server.address);
        ensure!(
            client.is_ipv4() == server.is_ipv4(),
            "address: {client} and {server} are of two families; the measured path has one"
        );
        ensure!(
            client != server,
            "address: both hosts have {client}; for one machine leave --hosts out"
        );
        Ok(inventory)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "[client]\nssh = 'a@b'\naddress = '10.0.0.1'\n[server]\nssh = 'c'\nport = 2222\naddress = '10.0.0.2'\n";

    #[test]
    fn paths_are_taken_from_the_inventory_and_the_rest_has_defaults() {
        let inventory = Inventory::parse(GOOD, Path::new("/etc/runs")).unwrap();
        assert_eq!(inventory.client.known_hosts, Path::new("/etc/runs/hosts.known"));
        assert_eq!((inventory.client.port, inventory.server.port), (22, 2222));
        assert_eq!(inventory.client.identity, None);
    }

    #[test]
    fn what_is_wrong_is_said_with_its_place() {
        for (from, to, word) in [
            ("port = 2222", "port = 'x'", "line 6"),
            ("port = 2222", "prot = 2222", "unknown field `prot`"),
            ("'10.0.0.2'", "'10.0.0'", "line 7"),
            ("'10.0.0.2'", "'10.0.0.1'", "leave --hosts out"),
            ("'10.0.0.2'", "'::1'", "two families"),
            ("'a@b'", "'-oProxyCommand=x'", "give user@host"),
            ("port = 2222", "identity = 'absent'", "no file /etc/runs/absent"),
            ("[server]", "[sever]", "unknown field `sever`"),
        ] {
            let error = Inventory::parse(&GOOD.replace(from, to), Path::new("/etc/runs")).unwrap_err();
            let text = format!("{error:#}");
            assert!(text.contains(word), "{to}: {text}");
        }
    }
}
