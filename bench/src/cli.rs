//! The command line.

use std::{net::IpAddr, path::PathBuf, time::Duration};

use clap::{Args, Parser, Subcommand};

use crate::{
    audit::{Claim, Options as AuditOptions, TimeUnit},
    collect::{
        doctor::Questions,
        run::{RunOptions, ServerChoice, Until},
    },
    plan::{
        Arm, Arrivals, Plan,
        condition::{Condition, EXTRA_NS_MAX},
        usual_quantile,
    },
    scenario::{self, Percentile, Scenario},
    truth::{Case, TruthOptions},
};

/// Kernel-aware A/B benchmark of TLS 1.3 key exchanges: every request in the tail gets its kernel-level cause.
#[derive(Debug, Parser)]
#[command(version, about)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub verb: Verb,
}

/// The verbs.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Run the A/B on this machine (needs root) or between two hosts (--hosts), record the kernel, and report. Exits with 0 if it
    /// ran to its end, whatever it thinks of itself (`valid` in summary.json tells), with 1 if not, with 130 if interrupted.
    Run(Box<RunArgs>),
    /// List the scenarios: what `run --scenario` varies, and what each is to answer.
    Scenarios(ScenariosArgs),
    /// Make the report again from a run's recorded files.
    Analyze(AnalyzeArgs),
    /// Tell the stories of single requests, interval by interval and cause by cause.
    Explain(ExplainArgs),
    /// Inject known culprits into real runs, and score how often the attribution names them (needs root).
    Truth(TruthArgs),
    /// Bring home what a run left on its hosts when its connection was lost, clean up there, and report.
    Fetch(AnalyzeArgs),
    /// Examine this host: what will not work here, and what would make its figures doubtful.
    Doctor(DoctorArgs),
    /// Examine published results again: what they claim against what their own data allow.
    ///
    /// PATH is a Gatling report's folder (or one of its req_*.html, or a folder of reports), a log of HdrHistogram (V2), or a CSV
    /// file of raw latencies. Exits with 1 if a published figure is impossible.
    Audit(AuditArgs),
    /// Set published runs side by side: other hosts, architectures, kernels, servers or dates.
    ///
    /// A run is known by its summary.json and manifest.json, so that no recordings are needed. The first run is what each other is
    /// held against. Everything in which their manifests differ, and what each run failed, stands above the numbers.
    Compare(CompareArgs),
    /// Print the architectures of an inventory's hosts, one a line: what the program is to be built for.
    #[command(hide = true)]
    Machines {
        /// The inventory.
        hosts: PathBuf,
    },
    /// Have the program built on an inventory's hosts, one of each architecture, and bring it here.
    #[command(hide = true)]
    BuildThere {
        /// The inventory.
        hosts: PathBuf,
        /// The sources, as a tar archive.
        #[arg(long)]
        sources: PathBuf,
        /// Where target/deploy with the programs is to be.
        #[arg(long)]
        home: PathBuf,
    },
    /// Say what the requests that were under way while a machine was stopped are laid to, as JSON lines or as a table.
    #[command(hide = true)]
    Stops(AnalyzeArgs),
    /// One role of a run, told what to do on stdin.
    #[command(hide = true)]
    Agent,
}

/// Flags of `run`.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// What is varied besides the arms: a scenario by its name (`pqtail scenarios`), or a file of one in TOML.
    #[arg(long, default_value = scenario::DEFAULT)]
    pub scenario: String,
    /// Find the rates that the load generator and the server can do, and that are safe to quote: the scenario rate-sweep.
    #[arg(long, conflicts_with = "scenario")]
    pub calibrate: bool,
    /// Requests per second, each a fresh connection [default: the scenario's, else 300].
    #[arg(long)]
    pub rate: Option<f64>,
    /// Measured part of a trial, for example 10s or 5m [default: the scenario's, else 10s].
    #[arg(long, value_parser = humantime::parse_duration)]
    pub duration: Option<Duration>,
    /// Part of a trial before it that is sent but not counted [default: the scenario's, else 2s].
    #[arg(long, value_parser = humantime::parse_duration)]
    pub warmup: Option<Duration>,
    /// Trials per arm, under each condition of the scenario [default: the scenario's, else 5].
    #[arg(long)]
    pub trials: Option<u32>,
    /// Run further trials until the 95 % interval of the difference at the median is at most this share of the baseline's median to
    /// each side, for example 0.02. --trials are run first and decide how many; so the interval stays as sure as it says.
    #[arg(long, value_name = "RELATIVE_WIDTH", value_parser = relative_width)]
    pub until: Option<f64>,
    /// Trials per arm that --until may run at most.
    #[arg(long, default_value_t = 50)]
    pub trials_max: u32,
    /// Run a trial again, three times at most, if the hypervisor took more than this share of the time in which a measured CPU had work,
    /// by /proc/stat, for example 0.05. Those set aside are counted in the report, and kept. Takes up to four times as long.
    #[arg(long, value_name = "SHARE", value_parser = steal_share)]
    pub steal_max: Option<f64>,
    /// Run the first arm against itself: of at least 16 trials, 200 comparisons in which every difference that shows is a false alarm.
    #[arg(long, conflicts_with = "until")]
    pub null: bool,
    /// With --null: also run the arm with this much computing added to each handshake in the server, for example 50us. Of 200 comparisons
    /// of five blocks, how many intervals at the median hold it? Add little at a low rate: what waits behind another's addition gains
    /// more than its own.
    #[arg(long, requires = "null", value_parser = known_shift)]
    pub known_shift: Option<Duration>,
    /// Arms, the first being the baseline [default: the scenario's, else x25519,x25519mlkem768].
    #[arg(long, value_delimiter = ',')]
    pub arms: Vec<Arm>,
    /// Spread of the intended starts [default: the scenario's, else poisson].
    #[arg(long, value_enum)]
    pub arrivals: Option<Arrivals>,
    /// Seed of trial order and arrivals; drawn anew and recorded if absent.
    #[arg(long)]
    pub seed: Option<u64>,
    /// A request that takes longer is a failure [default: the scenario's, else 5s].
    #[arg(long, value_parser = humantime::parse_duration)]
    pub timeout: Option<Duration>,
    /// The highest percentile that is to be quoted, which needs 10 samples beyond it [default: the scenario's, else p99.9].
    #[arg(long)]
    pub percentile: Option<Percentile>,
    /// Folder for results folders.
    #[arg(long, default_value = "results")]
    pub results: PathBuf,
    /// Who serves.
    #[command(flatten)]
    pub server: ServerArgs,
    /// Run between the two hosts of this inventory (TOML), reached by SSH, instead of on this machine.
    #[arg(long)]
    pub hosts: Option<PathBuf>,
    /// Folder that holds pqtail-x86_64 and pqtail-aarch64 for the hosts [default: this program].
    #[arg(long, requires = "hosts")]
    pub binaries: Option<PathBuf>,
    /// CPUs of the load generator, one worker each [default: 0].
    #[arg(long, value_delimiter = ',')]
    pub client_cpus: Vec<u32>,
    /// CPUs of the server, one worker each [default: 1 where there is one].
    #[arg(long, value_delimiter = ',')]
    pub server_cpus: Vec<u32>,
    /// CPUs of the drain of kernel records [default: those that are spare].
    #[arg(long, value_delimiter = ',')]
    pub drain_cpus: Vec<u32>,
    /// First port of the arms, inside the server's own network namespace.
    #[arg(long, default_value_t = 8443)]
    pub port: u16,
    /// Period of the per-CPU heartbeat; 0s for none.
    #[arg(long, default_value = "1ms", value_parser = humantime::parse_duration)]
    pub heartbeat: Duration,
    /// Size of the kernel's record ring in MiB, a power of two.
    #[arg(long, default_value_t = 64, value_parser = ring_mib)]
    pub ring_mib: u32,
    /// Give the load generator this share of one CPU at most, by a cgroup, to see what a drowning one measures. On this machine only.
    #[arg(long, value_parser = cpu_share)]
    pub client_cpu_share: Option<f64>,
    /// Run the A/B without recording the kernel: no causes.
    #[arg(long)]
    pub no_probes: bool,
    /// Print summary.json instead of tables.
    #[arg(long)]
    pub json: bool,
    /// File of faults for the server to commit on order, as the truth suite makes it.
    #[arg(long, hide = true)]
    pub faults: Option<PathBuf>,
    /// No progress on stderr.
    #[arg(long)]
    pub quiet: bool,
}

/// Flags of `scenarios`.
#[derive(Debug, Args)]
pub struct ScenariosArgs {
    /// Print them as JSON instead of a table.
    #[arg(long)]
    pub json: bool,
}

/// Flags that say who serves.
#[derive(Clone, Debug, Args)]
pub struct ServerArgs {
    /// Who serves: `embedded` (rustls, stamps of its own), `nginx` (OpenSSL, started for the run), or `adopted`: whoever listens
    /// on --port already and uses OpenSSL. The last two are told by uprobes and the kernel's records.
    #[arg(long, value_enum, default_value_t = ServerName::Embedded)]
    pub server: ServerName,
    /// The nginx on the server's host, as it is called inside --nginx-root [default: the inventory's, else /usr/sbin/nginx]. It
    /// needs OpenSSL 3.5 for the post-quantum arms.
    #[arg(long)]
    pub nginx: Option<PathBuf>,
    /// Folder on the server's host with a file system of its own in which that nginx lives.
    #[arg(long)]
    pub nginx_root: Option<PathBuf>,
    /// The libssl of an adopted server, or its executable if libssl is linked in, as the server sees it [default: what it has
    /// mapped].
    #[arg(long)]
    pub libssl: Option<PathBuf>,
    /// An adopted server has one port for all arms, so that the client's offer decides.
    #[arg(long)]
    pub one_port: bool,
}

impl ServerArgs {
    fn choice(&self) -> ServerChoice {
        match self.server {
            ServerName::Embedded => ServerChoice::Embedded,
            ServerName::Nginx => ServerChoice::Nginx {
                path: self.nginx.clone(),
                root: self.nginx_root.clone(),
            },
            ServerName::Adopted => ServerChoice::Adopted {
                libssl: self.libssl.clone(),
                one_port: self.one_port,
            },
        }
    }
}

/// Values of `--server`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum ServerName {
    /// The embedded server.
    Embedded,
    /// An nginx that is started for the run.
    Nginx,
    /// A server that runs already.
    Adopted,
}

/// Flags of `analyze` and `fetch`.
#[derive(Debug, Args)]
pub struct AnalyzeArgs {
    /// A run's results folder.
    pub results: PathBuf,
    /// Print summary.json instead of tables.
    #[arg(long)]
    pub json: bool,
}

/// Flags of `explain`.
#[derive(Debug, Args)]
pub struct ExplainArgs {
    /// A run's results folder.
    pub results: PathBuf,
    /// The worst so many outliers.
    #[arg(long, default_value_t = 10, conflicts_with = "request")]
    pub top: usize,
    /// One request by its number in its trial, outlier or not.
    #[arg(long)]
    pub request: Option<u32>,
    /// The trial of --request [default: where the request of that number took longest]; without --request, outliers of this
    /// trial only.
    #[arg(long)]
    pub trial: Option<u32>,
    /// Print outliers as JSON lines instead of stories.
    #[arg(long)]
    pub json: bool,
}

/// Flags of `truth`.
#[derive(Debug, Args)]
pub struct TruthArgs {
    /// Cases to run [default: all].
    #[arg(long, value_delimiter = ',')]
    pub cases: Vec<Case>,
    /// Measured part of each trial; a case has one trial per arm.
    #[arg(long, default_value = "10s", value_parser = humantime::parse_duration)]
    pub duration: Duration,
    /// Requests per second.
    #[arg(long, default_value_t = 200.0)]
    pub rate: f64,
    /// Seed of the order of cases and the times of injections; drawn anew and printed if absent.
    #[arg(long)]
    pub seed: Option<u64>,
    /// Keep the cases' results in this folder.
    #[arg(long)]
    pub keep: Option<PathBuf>,
    /// Who serves. Only the embedded server commits faults of its own; with another the cases that need these are left out.
    #[command(flatten)]
    pub server: ServerArgs,
    /// Fail if a cause's precision or recall is below this share.
    #[arg(long)]
    pub demand: Option<f64>,
    /// Print the report as JSON instead of tables.
    #[arg(long)]
    pub json: bool,
}

/// Flags of `doctor`.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Requests per second that will be asked.
    #[arg(long)]
    pub rate: Option<f64>,
    /// CPUs that the run will use [default: all that may be used].
    #[arg(long, value_delimiter = ',')]
    pub cpus: Vec<u32>,
    /// Address of the other end.
    #[arg(long)]
    pub peer: Option<IpAddr>,
    /// Folder for results folders.
    #[arg(long, default_value = "results")]
    pub results: PathBuf,
    /// Print the findings as JSON instead of a table.
    #[arg(long)]
    pub json: bool,
}

impl DoctorArgs {
    /// As the preflight takes them.
    #[must_use]
    pub fn questions(&self) -> Questions {
        Questions {
            rate_hz: self.rate,
            cpus: self.cpus.clone(),
            peer: self.peer,
            folder: self.results.clone(),
        }
    }
}

/// Flags of `compare`.
#[derive(Debug, Args)]
pub struct CompareArgs {
    /// Results folders of two runs or more.
    #[arg(required = true, num_args = 2..)]
    pub results: Vec<PathBuf>,
    /// Print the comparison as JSON instead of tables.
    #[arg(long)]
    pub json: bool,
}

/// Flags of `audit`.
#[derive(Debug, Args)]
pub struct AuditArgs {
    /// Published results; several are arms to compare, or trials of arms that bear the same name in each.
    #[arg(required = true)]
    pub paths: Vec<PathBuf>,
    /// Unit of latencies [default: what a CSV column's name ends in, else ms in CSV and ns in a histogram log].
    #[arg(long, value_enum)]
    pub unit: Option<TimeUnit>,
    /// CSV: column of latencies, by name or by number from 1 [default: latency, elapsed, duration or time].
    #[arg(long)]
    pub column: Option<String>,
    /// CSV: column that names each request's arm [default: the file is one arm].
    #[arg(long)]
    pub arm_column: Option<String>,
    /// CSV: column of the requests' starts [default: timestamp or start, if there is one].
    #[arg(long)]
    pub timestamp_column: Option<String>,
    /// CSV: unit of the starts [default: by their size if they count from 1970, else that of the latencies].
    #[arg(long, value_enum)]
    pub timestamp_unit: Option<TimeUnit>,
    /// A figure in ms that was published of a CSV file or a histogram log, for example p99=39 or sd=1.5; its last digit says how it
    /// was rounded.
    #[arg(long = "claim", value_parser = figure)]
    pub claims: Vec<(String, Claim)>,
    /// Print the report as JSON instead of text.
    #[arg(long)]
    pub json: bool,
}

impl AuditArgs {
    /// As the audit takes them.
    #[must_use]
    pub fn options(&self) -> AuditOptions {
        AuditOptions {
            unit: self.unit,
            column: self.column.clone(),
            arm_column: self.arm_column.clone(),
            timestamp_column: self.timestamp_column.clone(),
            timestamp_unit: self.timestamp_unit,
            claims: self.claims.clone(),
        }
    }
}

fn figure(text: &str) -> Result<(String, Claim), String> {
    const FORM: &str = "a figure and its value in ms, such as p99=39";
    let (name, value) = text.split_once('=').ok_or(FORM)?;
    let decimals = value.split_once('.').map_or(0, |(_, decimals)| decimals.len());
    let decimals = i32::try_from(decimals).map_err(|_| FORM)?;
    let number = value.parse::<f64>().ok().filter(|value| value.is_finite());
    let claim = Claim {
        value: number.ok_or(FORM)?,
        unit: 10f64.powi(-decimals),
    };
    Ok((name.to_owned(), claim))
}

impl TruthArgs {
    /// As the suite takes them.
    #[must_use]
    pub fn options(&self) -> TruthOptions {
        TruthOptions {
            cases: if self.cases.is_empty() {
                let is_possible =
                    |case: &Case| !case.needs_embedded() || self.server.server == ServerName::Embedded;
                Case::all().into_iter().filter(is_possible).collect()
            } else {
                self.cases.clone()
            },
            server: self.server.choice(),
            duration: self.duration,
            rate_hz: self.rate,
            seed: self.seed.unwrap_or_else(drawn_seed),
            keep: self.keep.clone(),
        }
    }
}

/// 53 bits, so that no JSON reader rounds it.
fn drawn_seed() -> u64 {
    rand::random::<u64>() >> 11
}

fn ring_mib(text: &str) -> Result<u32, String> {
    match text.parse::<u32>() {
        Ok(mib) if mib.is_power_of_two() && mib <= 1024 => Ok(mib),
        _ => Err("a power of two from 1 to 1024".to_owned()),
    }
}

fn cpu_share(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(share) if (0.01..=1.0).contains(&share) => Ok(share),
        _ => Err("a share of one CPU from 0.01 to 1".to_owned()),
    }
}

fn steal_share(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(share) if (0.0..1.0).contains(&share) => Ok(share),
        _ => Err("a share of a CPU's time from 0 to below 1, such as 0.01".to_owned()),
    }
}

fn relative_width(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(width) if width > 0.0 && width < 1.0 => Ok(width),
        _ => Err("a share of the baseline's median between 0 and 1, such as 0.02".to_owned()),
    }
}

fn known_shift(text: &str) -> Result<Duration, String> {
    match humantime::parse_duration(text) {
        Ok(shift) if !shift.is_zero() && ns(shift) <= EXTRA_NS_MAX => Ok(shift),
        _ => Err("a duration above 0 and of at most a second, such as 50us".to_owned()),
    }
}

fn ns(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// What neither the flags nor the scenario say.
mod usual {
    use std::time::Duration;

    pub(super) const RATE_HZ: f64 = 300.0;
    pub(super) const TRIALS: u32 = 5;
    pub(super) const DURATION: Duration = Duration::from_secs(10);
    pub(super) const WARMUP: Duration = Duration::from_secs(2);
    pub(super) const TIMEOUT: Duration = Duration::from_secs(5);
}

/// Trials of one arm from which an arm can be compared with itself ([`crate::statistics::null`]).
const NULL_TRIALS_MIN: u32 = 16;

impl RunArgs {
    /// As the controller takes them; draws a seed if none is given.
    ///
    /// # Errors
    /// When there is no such scenario, or it is not understood.
    pub fn options(self) -> anyhow::Result<RunOptions> {
        let name = if self.calibrate {
            scenario::CALIBRATION
        } else {
            &self.scenario
        };
        let scenario = Scenario::find(name)?;
        let mut arms = if self.arms.is_empty() {
            scenario.arms.unwrap_or_else(scenario::default_arms)
        } else {
            self.arms
        };
        let mut trials_per_arm = self.trials.or(scenario.trials).unwrap_or(usual::TRIALS);
        let mut conditions = scenario.conditions;
        if self.null {
            arms.truncate(1);
            for condition in &mut conditions {
                condition.arms = None;
            }
            if let Some(shift) = self.known_shift {
                let shifted = conditions.iter().map(|condition| Condition {
                    server_extra_ns: ns(shift),
                    ..condition.clone()
                });
                let shifted: Vec<_> = shifted.collect();
                conditions.extend(shifted);
            }
            trials_per_arm = trials_per_arm.saturating_mul(2).max(NULL_TRIALS_MIN);
        }
        let server = match self.server.server {
            ServerName::Embedded => "",
            ServerName::Nginx => "-nginx",
            ServerName::Adopted => "-adopted",
        };
        let null = if self.null { "-null" } else { "" };
        Ok(RunOptions {
            plan: Plan {
                scenario: format!("{}{server}{null}", scenario.name),
                arms,
                trials_per_arm,
                rate_hz: self.rate.or(scenario.rate_hz).unwrap_or(usual::RATE_HZ),
                duration_ns: ns(self.duration.or(scenario.duration).unwrap_or(usual::DURATION)),
                warmup_ns: ns(self.warmup.or(scenario.warmup).unwrap_or(usual::WARMUP)),
                arrivals: self.arrivals.or(scenario.arrivals).unwrap_or(Arrivals::Poisson),
                seed: self.seed.unwrap_or_else(drawn_seed),
                timeout_ns: ns(self.timeout.or(scenario.timeout).unwrap_or(usual::TIMEOUT)),
                probes: !self.no_probes,
                conditions,
                highest_quantile: self
                    .percentile
                    .map(|percentile| percentile.0)
                    .or(scenario.highest_quantile)
                    .unwrap_or(usual_quantile()),
                first_stage: None,
            },
            until: self.until.map(|relative_width| Until {
                relative_width,
                trials_max: self.trials_max,
            }),
            steal_share_max: self.steal_max,
            results: self.results,
            server: self.server.choice(),
            hosts: self.hosts,
            binaries: self.binaries,
            client_cpus: self.client_cpus,
            server_cpus: self.server_cpus,
            drain_cpus: self.drain_cpus,
            port: self.port,
            heartbeat_ns: ns(self.heartbeat),
            ring_bytes: self.ring_mib << 20,
            client_cpu_share: self.client_cpu_share,
            faults: self.faults,
            quiet: self.quiet,
        })
    }
}
