//! Terraform, run on a copy of `infra/` beside its state.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{Command, ExitStatus, Stdio},
    sync::{Arc, atomic::AtomicBool},
};

use anyhow::{Context as _, bail, ensure};
use serde_json::Value;

use crate::{output, root};

/// Environment variable: a folder of provider plugins in the layout of a file system mirror, in place of the registry.
const PLUGINS_VARIABLE: &str = "PQTAIL_TF_PLUGINS";

/// Where an administrator may have put such a mirror. Without one, Terraform asks the public registry.
const USUAL_MIRRORS: [&str; 2] = ["/usr/local/share/terraform/plugins", "/opt/tf-plugins"];

/// The provider's folder in a mirror.
const PROVIDER: &str = "registry.terraform.io/hashicorp/aws";

const FILES: [&str; 5] = [
    "main.tf",
    "variables.tf",
    "outputs.tf",
    "versions.tf",
    "cloud-init.yaml",
];

/// Terraform reads this file by itself.
const VARIABLES: &str = "run.auto.tfvars.json";

/// What `infra/left` asks the provider for.
pub(super) const LOOKED_FOR: &str = "instances, volumes, VPCs, subnets, security groups or route tables";

/// Fails unless there is a Terraform.
pub(super) fn require() -> anyhow::Result<()> {
    output("terraform version", terraform(Path::new(".")).arg("version"))
        .map(drop)
        .context("Terraform 1.11 or later is needed: https://developer.hashicorp.com/terraform/install")
}

/// The copy and the state of one pair of hosts.
pub(super) struct Terraform {
    folder: PathBuf,
    left: PathBuf,
}

impl Terraform {
    pub(super) fn new(state: &Path) -> Self {
        Self {
            folder: state.join("terraform"),
            left: state.join("terraform-left"),
        }
    }

    /// Whether an `apply` may have made something that no `destroy` has removed.
    pub(super) fn was_begun(&self) -> bool {
        self.folder.join(VARIABLES).exists()
    }

    /// Copies the files, so that `down` works on what `up` made even if the checkout has changed since.
    pub(super) fn begin(&self, variables: &Value) -> anyhow::Result<()> {
        fill(&root().join("infra"), &self.folder, &FILES)?;
        init(&self.folder)?;
        let path = self.folder.join(VARIABLES);
        fs::write(&path, format!("{variables:#}\n")).with_context(|| format!("write {}", path.display()))
    }

    pub(super) fn variables(&self) -> anyhow::Result<Value> {
        let path = self.folder.join(VARIABLES);
        let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
        serde_json::from_str(&text).with_context(|| format!("{} is damaged", path.display()))
    }

    /// Makes the hosts and returns the output `hosts`.
    pub(super) fn apply(&self) -> anyhow::Result<Value> {
        let mut apply = terraform(&self.folder);
        apply.args(["apply", "-input=false", "-no-color", "-auto-approve"]);
        to_its_end("terraform apply", &mut apply)?;
        let mut show = terraform(&self.folder);
        output_json("hosts", show.args(["output", "-json", "hosts"]))
    }

    /// Destroys what the state has, and returns it.
    pub(super) fn destroy(&self) -> anyhow::Result<Vec<String>> {
        // Again, for a copy whose plugins were removed in between.
        init(&self.folder)?;
        let removed = if self.folder.join("terraform.tfstate").exists() {
            let mut list = terraform(&self.folder);
            output("terraform state list", list.args(["state", "list"]))?
                .lines()
                .filter(|line| !line.starts_with("data."))
                .map(str::to_owned)
                .collect()
        } else {
            Vec::new()
        };
        if removed.is_empty() {
            return Ok(vec!["there was nothing to destroy".to_owned()]);
        }
        let mut destroy = terraform(&self.folder);
        destroy.args(["destroy", "-input=false", "-no-color", "-auto-approve"]);
        to_its_end("terraform destroy", &mut destroy)?;
        Ok(removed)
    }

    /// What the provider still has under the run's tag, whatever the state says.
    pub(super) fn left(&self) -> anyhow::Result<Vec<String>> {
        let variables = self.variables()?;
        fill(&root().join("infra/left"), &self.left, &["main.tf"])?;
        init(&self.left)?;
        let mut apply = terraform(&self.left);
        apply.args(["apply", "-input=false", "-no-color", "-auto-approve"]);
        for name in ["run", "region", "mock_endpoint"] {
            let value = variables[name].as_str().unwrap_or_default();
            apply.arg(format!("-var={name}={value}"));
        }
        apply.stdout(Stdio::null());
        to_its_end("ask the provider what is left (terraform apply)", &mut apply)?;
        let mut show = terraform(&self.left);
        let left = output_json("left", show.args(["output", "-json", "left"]))?;
        let kinds = left.as_object().context("Terraform's output left is no object")?;
        let mut found = Vec::new();
        for (kind, identifiers) in kinds {
            let identifiers = identifiers
                .as_array()
                .with_context(|| format!("Terraform's output left.{kind} is no list"))?;
            found.extend(identifiers.iter().map(|each| format!("{kind} {each}")));
        }
        Ok(found)
    }

    /// Removes copy and state. Only once nothing is left.
    pub(super) fn forget(&self) -> anyhow::Result<()> {
        for folder in [&self.left, &self.folder] {
            if folder.exists() {
                fs::remove_dir_all(folder).with_context(|| format!("remove {}", folder.display()))?;
            }
        }
        Ok(())
    }
}

fn fill(from: &Path, to: &Path, files: &[&str]) -> anyhow::Result<()> {
    fs::create_dir_all(to).with_context(|| format!("make {}", to.display()))?;
    for file in files {
        fs::copy(from.join(file), to.join(file))
            .with_context(|| format!("copy {} to {}", from.join(file).display(), to.display()))?;
    }
    // The lock file in git has the checksum of one platform only. On others the registry's signature vouches for the
    // pinned version.
    if cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        let lock = ".terraform.lock.hcl";
        fs::copy(root().join("infra").join(lock), to.join(lock))
            .with_context(|| format!("copy {lock} to {}", to.display()))?;
    }
    Ok(())
}

fn init(folder: &Path) -> anyhow::Result<()> {
    let mut init = terraform(folder);
    init.args(["init", "-input=false", "-no-color"]);
    if let Some(mirror) = mirror()? {
        init.arg(format!("-plugin-dir={}", mirror.display()));
    }
    output("terraform init", &mut init).map(drop).with_context(|| {
        format!("fetch the pinned provider: without the public registry, name a mirror of its plugins in {PLUGINS_VARIABLE}")
    })
}

fn mirror() -> anyhow::Result<Option<PathBuf>> {
    if let Some(named) = env::var_os(PLUGINS_VARIABLE) {
        let named = PathBuf::from(named);
        ensure!(
            named.join(PROVIDER).is_dir(),
            "{PLUGINS_VARIABLE}: {} has no {PROVIDER}",
            named.display()
        );
        return Ok(Some(named));
    }
    let usual = USUAL_MIRRORS.iter().map(PathBuf::from);
    Ok(usual.into_iter().find(|each| each.join(PROVIDER).is_dir()))
}

fn terraform(folder: &Path) -> Command {
    let mut command = Command::new("terraform");
    command.current_dir(folder);
    // Ours are given in full; a caller's would mix with them.
    for variable in ["TF_CLI_ARGS", "TF_DATA_DIR", "TF_WORKSPACE"] {
        command.env_remove(variable);
    }
    // A name that leads nowhere earns a warning each time, and sets nothing.
    if env::var_os("TF_CLI_CONFIG_FILE").is_some_and(|named| !Path::new(&named).exists()) {
        command.env_remove("TF_CLI_CONFIG_FILE");
    }
    command.env("TF_IN_AUTOMATION", "1");
    command.env("CHECKPOINT_DISABLE", "1");
    command
}

/// Runs a command that must not be left half done: Ctrl-C reaches it by its terminal, and this program waits while it
/// winds up and writes its state.
fn to_its_end(what: &str, command: &mut Command) -> anyhow::Result<()> {
    let interrupted = Arc::new(AtomicBool::new(false));
    let watch = signal_hook::flag::register(signal_hook::consts::SIGINT, Arc::clone(&interrupted))
        .context("watch for Ctrl-C")?;
    let status = command
        .status()
        .with_context(|| format!("{what}: start terraform"));
    signal_hook::low_level::unregister(watch);
    let status: ExitStatus = status?;
    if interrupted.load(std::sync::atomic::Ordering::Relaxed) {
        bail!("{what} was interrupted ({status})");
    }
    ensure!(
        status.success(),
        "{what} failed ({status}); its reasons are above"
    );
    Ok(())
}

fn output_json(name: &str, command: &mut Command) -> anyhow::Result<Value> {
    let printed = output("terraform output", command)?;
    serde_json::from_str(&printed).with_context(|| format!("terraform output {name}: {printed}"))
}
