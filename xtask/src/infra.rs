//! Two hosts at a cloud provider: `up`, `wait-ready`, `down`. What they are is written in `infra/*.tf`.
//!
//! Everything that one pair of hosts needs lies in one folder that git ignores and `cargo clean` leaves alone: a copy of
//! the Terraform files with its state, the SSH key, pinned host keys, and the inventory for `pqtail run --hosts`.

mod prices;
mod ready;
mod terraform;

use std::{
    fs,
    io::{self, BufRead as _, IsTerminal as _, Write as _},
    path::PathBuf,
    process::Command,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};

pub(crate) use self::ready::{WaitReadyOptions, wait_ready};
use self::terraform::Terraform;
use crate::{
    debian::{self, Needed},
    output, root, run,
};

/// Tells a caller its own public address.
const ADDRESS_SERVICE: &str = "https://checkip.amazonaws.com";

/// Where nginx lies on a host that `infra/cloud-init.yaml` has set up.
const NGINX: &str = "/opt/pqtail/nginx/sbin/nginx";

#[derive(clap::Args)]
pub(crate) struct UpOptions {
    /// Instance type of the load generator: c7g.large (Graviton3), c7i.large (Sapphire Rapids), c6a.large (EPYC)
    #[arg(long, default_value = "c7g.large")]
    client_type: String,
    /// Instance type of the server
    #[arg(long, default_value = "c7g.large")]
    server_type: String,
    /// Spot instances: cheaper, and the provider may take them away (the default)
    #[arg(long, conflicts_with = "on_demand")]
    spot: bool,
    /// On-demand instances
    #[arg(long)]
    on_demand: bool,
    /// A cluster placement group (the default)
    #[arg(long, conflicts_with = "no_placement_group")]
    placement_group: bool,
    /// No placement group
    #[arg(long)]
    no_placement_group: bool,
    /// Region of the provider
    #[arg(long, default_value = "eu-central-1")]
    region: String,
    /// Availability zone of both hosts; without it the first that has both types
    #[arg(long, default_value = "")]
    zone: String,
    /// Time to live: then the hosts power themselves off, which terminates them
    #[arg(long, default_value = "2h", value_parser = humantime::parse_duration)]
    ttl: Duration,
    /// Addresses that may reach SSH, such as 203.0.113.7/32; without it this machine's public address is looked up
    #[arg(long)]
    allow: Option<String>,
    /// Does not ask
    #[arg(long)]
    yes: bool,
    /// URL of a mock cloud in place of the provider
    #[arg(long, default_value = "")]
    mock_endpoint: String,
    #[command(flatten)]
    place: Place,
}

#[derive(clap::Args)]
pub(crate) struct DownOptions {
    #[command(flatten)]
    place: Place,
}

/// Where what belongs to the pair of hosts is kept.
#[derive(clap::Args)]
pub(crate) struct Place {
    /// Folder of keys, inventory and Terraform's state; without it `infra/state`
    #[arg(long)]
    state: Option<PathBuf>,
}

impl Place {
    fn folder(&self) -> anyhow::Result<PathBuf> {
        let folder = self.state.clone().unwrap_or_else(|| root().join("infra/state"));
        std::path::absolute(&folder).with_context(|| format!("find {}", folder.display()))
    }
}

/// Makes the hosts and writes their inventory.
///
/// # Errors
/// When it is refused, or Terraform fails; whatever was made until then is in the state, and `down` destroys it.
pub(crate) fn up(options: &UpOptions) -> anyhow::Result<()> {
    let folder = options.place.folder()?;
    let inventory = folder.join("hosts.toml");
    if inventory.exists() {
        println!("up already: {}. `cargo xtask down` ends it.", inventory.display());
        return Ok(());
    }
    let terraform = Terraform::new(&folder);
    ensure!(
        !terraform.was_begun(),
        "an earlier `up` did not come to its end, and what it made may still cost money: run `cargo xtask down` first"
    );
    terraform::require()?;
    let allow = match &options.allow {
        Some(allow) => allow.clone(),
        None => looked_up_address()?,
    };
    let ttl_minutes = options.ttl.as_secs().div_ceil(60);
    ensure!(
        (15..=1440).contains(&ttl_minutes),
        "--ttl: from 15m, which the set-up of a host takes, to 24h"
    );

    show_plan(options, &allow, ttl_minutes);
    if !options.yes {
        confirm()?;
    }

    debian::require(
        "the key of the hosts",
        &[Needed {
            program: "ssh-keygen",
            package: "openssh-client",
        }],
    )?;
    let name = name_of_run()?;
    let expiry = SystemTime::now() + Duration::from_secs(ttl_minutes * 60);
    make_folder(&folder)?;
    let public_key = make_key(&folder, &name)?;
    terraform.begin(&json!({
        "run": name,
        "expiry": humantime::format_rfc3339_seconds(expiry).to_string(),
        "ttl_minutes": ttl_minutes,
        "public_key": public_key.trim(),
        "allow_cidr": allow,
        "region": options.region,
        "zone": options.zone,
        "client_type": options.client_type,
        "server_type": options.server_type,
        "spot": !options.on_demand,
        "placement_group": !options.no_placement_group,
        "mock_endpoint": options.mock_endpoint,
    }))?;
    let hosts = terraform.apply().context(
        "the hosts are not up, and parts of them may exist and cost money: run `cargo xtask down`, which destroys them",
    )?;
    fs::write(&inventory, inventory_text(&hosts)?)
        .with_context(|| format!("write {}", inventory.display()))?;
    println!(
        "up: run {name}, until {} at the latest\ninventory: {}\nnext: cargo xtask wait-ready",
        humantime::format_rfc3339_seconds(expiry),
        inventory.display()
    );
    Ok(())
}

/// Destroys what `up` made, and forgets the key only once the provider has nothing left.
///
/// # Errors
/// When Terraform fails or something is left; then it can be run again.
pub(crate) fn down(options: &DownOptions) -> anyhow::Result<()> {
    let folder = options.place.folder()?;
    let terraform = Terraform::new(&folder);
    if !terraform.was_begun() {
        println!("down already: {} knows of no hosts", folder.display());
        return Ok(());
    }
    terraform::require()?;
    let variables = terraform.variables()?;
    let name = variables["run"]
        .as_str()
        .context("the state's variables have no run")?;
    let removed = terraform
        .destroy()
        .context("not everything is destroyed, and what is left costs money: run `cargo xtask down` again")?;
    let left = terraform.left().context(
        "the hosts are destroyed, but whether anything is left is not verified: run `cargo xtask down` again",
    )?;
    ensure!(
        left.is_empty(),
        "the provider still has, tagged run = {name}: {}. Run `cargo xtask down` again, or delete them by hand",
        left.join(", ")
    );
    // The folder is ours down to these names; anything else in it stays.
    for file in ["hosts.toml", "known_hosts", "id_ed25519", "id_ed25519.pub"] {
        match fs::remove_file(folder.join(file)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("remove {file} from {}", folder.display()));
            }
            _ => {}
        }
    }
    terraform.forget()?;
    println!("down: {}", removed.join(", "));
    println!(
        "nothing is left: the provider lists no {} tagged run = {name}",
        terraform::LOOKED_FOR
    );
    Ok(())
}

fn show_plan(options: &UpOptions, allow: &str, ttl_minutes: u64) {
    println!("Two hosts in {}, with a network of their own:", options.region);
    println!("  client  {}", options.client_type);
    println!("  server  {}", options.server_type);
    println!(
        "  {}, {}placement group; SSH open to {allow} only",
        if options.on_demand { "on demand" } else { "spot" },
        if options.no_placement_group {
            "no "
        } else {
            "cluster "
        },
    );
    println!("  they power themselves off {ttl_minutes} minutes after their first boot");
    println!(
        "{}",
        prices::sentence(&[&options.client_type, &options.server_type], ttl_minutes)
    );
}

fn confirm() -> anyhow::Result<()> {
    ensure!(
        io::stdin().is_terminal(),
        "nobody to ask: standard input is no terminal. --yes goes ahead without asking"
    );
    print!("Go ahead? [y/N] ");
    io::stdout().flush()?;
    let mut answer = String::new();
    io::stdin().lock().read_line(&mut answer)?;
    ensure!(
        ["y", "yes"].contains(&answer.trim().to_lowercase().as_str()),
        "nothing was made"
    );
    Ok(())
}

fn looked_up_address() -> anyhow::Result<String> {
    let mut curl = Command::new("curl");
    curl.args([
        "--fail",
        "--silent",
        "--show-error",
        "--ipv4",
        "--max-time",
        "10",
        ADDRESS_SERVICE,
    ]);
    let printed = output("look up this machine's public address with curl", &mut curl)
        .context("--allow ADDRESS/32 says it instead")?;
    let address: std::net::Ipv4Addr = printed.trim().parse().with_context(|| {
        format!("{ADDRESS_SERVICE} answered no address: --allow ADDRESS/32 says it instead")
    })?;
    Ok(format!("{address}/32"))
}

/// Unique enough for the tags of one account: the second and the process.
fn name_of_run() -> anyhow::Result<String> {
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH)?;
    Ok(format!("{}-{}", since_1970.as_secs(), std::process::id()))
}

fn make_folder(folder: &std::path::Path) -> anyhow::Result<()> {
    use std::os::unix::fs::DirBuilderExt as _;
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(folder)
        .with_context(|| format!("make {}", folder.display()))
}

/// Makes the run's key pair and returns its public half. ssh-keygen gives the private half to its owner only.
fn make_key(folder: &std::path::Path, name: &str) -> anyhow::Result<String> {
    let key = folder.join("id_ed25519");
    // Of an `up` that ended before Terraform began; ssh-keygen would ask.
    for old in [key.clone(), key.with_extension("pub")] {
        if old.exists() {
            fs::remove_file(&old).with_context(|| format!("remove {}", old.display()))?;
        }
    }
    let mut keygen = Command::new("ssh-keygen");
    keygen.args([
        "-q",
        "-t",
        "ed25519",
        "-N",
        "",
        "-C",
        &format!("pqtail-{name}"),
        "-f",
    ]);
    run("make a key with ssh-keygen", keygen.arg(&key))?;
    let public = key.with_extension("pub");
    fs::read_to_string(&public).with_context(|| format!("read {}", public.display()))
}

/// The inventory of `pqtail run --hosts`, from Terraform's output `hosts`.
fn inventory_text(hosts: &Value) -> anyhow::Result<String> {
    let mut text = String::from("# Written by `cargo xtask up`; `cargo xtask down` removes it.\n");
    for name in ["client", "server"] {
        let of = |key: &str| {
            hosts[name][key]
                .as_str()
                .filter(|value| !value.is_empty())
                .with_context(|| format!("Terraform's output gives the {name} no {key}"))
        };
        text += &format!(
            "[{name}]\nssh = \"ubuntu@{}\"\nidentity = \"id_ed25519\"\nknown_hosts = \"known_hosts\"\naddress = \"{}\"\n",
            of("public_address")?,
            of("address")?
        );
        if name == "server" {
            text += &format!("nginx = \"{NGINX}\"\n");
        }
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_inventory_has_both_hosts_and_says_what_is_missing() {
        let hosts = json!({
            "client": {"public_address": "203.0.113.7", "address": "10.0.0.10"},
            "server": {"public_address": "203.0.113.8", "address": "10.0.0.11"},
        });
        let parsed: toml::Table = inventory_text(&hosts).unwrap().parse().unwrap();
        assert_eq!(parsed["client"]["ssh"].as_str(), Some("ubuntu@203.0.113.7"));
        assert_eq!(parsed["server"]["nginx"].as_str(), Some(NGINX));
        let error = inventory_text(&json!({"client": {"public_address": ""}})).unwrap_err();
        assert!(
            error.to_string().contains("the client no public_address"),
            "{error}"
        );
    }
}
