//! The preflight as a user starts it, against this host.

mod common;

use std::process::{Command, Output};

use pqtail::collect::{
    doctor::{Finding, Level},
    host,
    probes::{HEARTBEAT_NS_DEFAULT, ProbeSettings, Probes},
};

fn doctor(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_pqtail"))
        .arg("doctor")
        .args(arguments)
        .output()
        .expect("pqtail starts")
}

fn findings(arguments: &[&str]) -> (Vec<Finding>, bool) {
    let output = doctor(&[arguments, &["--json"]].concat());
    let findings = serde_json::from_slice(&output.stdout).expect("JSON of findings");
    (findings, output.status.success())
}

fn is_told(findings: &[Finding], rule: &str) -> bool {
    findings.iter().any(|each| each.rule == rule)
}

#[test]
fn findings_of_probes_agree_with_what_attaches() {
    let Some(_alone) = common::privileged("findings_of_probes_agree_with_what_attaches") else {
        return;
    };
    let (findings, success) = findings(&["--rate", "100", "--peer", "127.0.0.1"]);
    let failed = findings.iter().any(|each| each.level == Level::Fail);
    assert_eq!(success, !failed, "{findings:#?}");

    let probes = Probes::attach(&ProbeSettings {
        ports: vec![8443],
        cpus: host::allowed_cpus().expect("an affinity"),
        heartbeat_ns: Some(HEARTBEAT_NS_DEFAULT),
        ring_bytes: 1 << 20,
        reads: false,
    })
    .expect("root may attach");
    let mut missing: Vec<String> = probes
        .status()
        .iter()
        .filter(|each| !each.attached)
        .map(|each| format!("probe.{}", each.name))
        .collect();
    let mut told: Vec<String> = findings
        .iter()
        .filter(|each| each.rule.starts_with("probe."))
        .map(|each| each.rule.clone())
        .collect();
    missing.sort_unstable();
    told.sort_unstable();
    assert_eq!(told, missing);
    let all = findings
        .iter()
        .find(|each| each.rule == "probes")
        .expect("a finding of all");
    let expected = format!("{} of {} attach", probes.attached(), probes.status().len());
    assert_eq!(all.found, expected);
    for rule in [
        "kernel.version",
        "kernel.btf",
        "privileges",
        "clock.source",
        "clock.synchronised",
        "cpu.steal_clock",
        "net.interface",
        "tcp.ports",
        "neighbours",
        "cgroup.quota",
        "cloud.instance",
    ] {
        assert!(is_told(&findings, rule), "{rule} is not in {findings:#?}");
    }
}

#[test]
fn nobody_is_told_that_root_is_missing_and_gets_the_other_findings() {
    use std::os::unix::process::CommandExt as _;
    let test = "nobody_is_told_that_root_is_missing_and_gets_the_other_findings";
    if !common::is_privileged(test) {
        return;
    }
    // Where somebody else can read and run it: the build's folder may be root's alone.
    let folder = tempfile::tempdir().expect("a temporary folder");
    let copy = folder.path().join("pqtail");
    std::fs::copy(env!("CARGO_BIN_EXE_pqtail"), &copy).expect("a copy");
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(folder.path(), open).expect("a folder that all may enter");
    let output = Command::new(&copy)
        .args(["doctor", "--json"])
        .current_dir("/")
        .uid(65_534)
        .gid(65_534)
        .output()
        .expect("pqtail starts");
    assert!(!output.status.success());
    let findings: Vec<Finding> = serde_json::from_slice(&output.stdout).expect("JSON of findings");
    let privileges = findings
        .iter()
        .find(|each| each.rule == "privileges")
        .expect("a finding");
    assert_eq!(privileges.level, Level::Fail);
    assert!(privileges.found.contains("not root"), "{privileges:?}");
    assert!(is_told(&findings, "neighbours"), "{findings:#?}");
}

#[test]
fn a_table_without_a_terminal_has_no_colour() {
    let output = doctor(&[]);
    let text = String::from_utf8(output.stdout).expect("text");
    assert!(
        text.contains("kernel.version") && !text.contains('\u{1b}'),
        "{text}"
    );
}
