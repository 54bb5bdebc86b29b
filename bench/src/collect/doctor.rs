//! The preflight of one host: what it is, what will not work on it, and what would make its figures doubtful.
//!
//! Each module reads one side of the host and turns what it read into [`Finding`]s by pure functions. Reading never fails: what
//! a host does not tell is a note that says *unknown*. Nothing is changed; the probes are attached as a run attaches them, and
//! detached at once.

mod clocks;
mod cloud;
mod cpus;
mod finding;
mod kernel;
mod neighbours;
mod network;
mod resources;
mod root;

use std::{net::IpAddr, path::PathBuf};

use serde::{Deserialize, Serialize};

pub use self::finding::{Finding, Level};
use self::root::Root;
use super::host;

/// What the run will ask of the host. What is not known yet is left out, and so are the findings that depend on it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Questions {
    /// Requests per second, over all arms.
    pub rate_hz: Option<f64>,
    /// CPUs that the run will use; those that this process may use if empty.
    pub cpus: Vec<u32>,
    /// Address of the other end.
    pub peer: Option<IpAddr>,
    /// Folder for recordings.
    pub folder: PathBuf,
}

/// Examines the host of this process. Takes about a second: other processes are watched for half of it.
#[must_use]
pub fn examine(questions: &Questions) -> Vec<Finding> {
    let root = Root::of_this_host();
    let chosen = if questions.cpus.is_empty() {
        host::allowed_cpus().unwrap_or_default()
    } else {
        questions.cpus.clone()
    };
    let mut findings = kernel::examine(&root, &chosen);
    findings.extend(cpus::examine(&root, &chosen));
    findings.extend(clocks::examine(&root));
    findings.extend(network::examine(&root, &chosen, questions));
    findings.extend(resources::examine(&root, &questions.folder));
    findings.extend(neighbours::examine(&root));
    findings.extend(cloud::examine(&root));
    findings
}
