//! The controller's side of the protocol: one handle per agent, wherever that runs.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        mpsc::{self, Receiver, RecvTimeoutError, Sender},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, anyhow, bail};

use super::{
    agent::{Answer, Met, Order, PROTOCOL},
    link,
};

/// How long an agent may take to end after its orders have.
const END_MAX: Duration = Duration::from_secs(2);
const END_POLL: Duration = Duration::from_millis(20);

/// How often an agent on another host hears of a controller that has nothing to say.
const PING_EVERY: Duration = Duration::from_secs(5);

/// A child that plays one role, here or through a connection to another host. It dies with this value, whatever happens.
pub(super) struct Agent {
    name: &'static str,
    /// The host, if it is another.
    host: Option<&'static str>,
    child: Child,
    orders: Orders,
    answers: Receiver<anyhow::Result<Answer>>,
    /// Ends the pings when it goes.
    _alive: Sender<()>,
}

/// Where orders go, until nothing more does; pings go there too.
#[derive(Clone)]
struct Orders(Arc<Mutex<Option<ChildStdin>>>);

impl Orders {
    fn pipe(&self) -> MutexGuard<'_, Option<ChildStdin>> {
        // Whoever panicked in between may have left half a line, which the agent then names.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send(&self, order: &Order) -> anyhow::Result<()> {
        let mut line = serde_json::to_vec(order)?;
        line.push(b'\n');
        let mut pipe = self.pipe();
        let pipe = pipe.as_mut().context("an agent's stdin")?;
        Ok(pipe.write_all(&line).and_then(|()| pipe.flush())?)
    }

    /// Tells an agent that its controller lives, whatever that is busy with: another agent may take minutes over its set-up.
    fn ping(&self, ended: &Receiver<()>) {
        while ended.recv_timeout(PING_EVERY) == Err(RecvTimeoutError::Timeout) {
            if self.send(&Order::Ping).is_err() {
                return;
            }
        }
    }
}

impl Agent {
    /// Starts this very program as an agent, in a network namespace of its own or in ours.
    pub(super) fn start(
        name: &'static str,
        own_netns: bool,
        notices: Sender<String>,
    ) -> anyhow::Result<Self> {
        let program = std::env::current_exe().context("find this program's own file")?;
        let mut command = Command::new(program);
        command.arg("agent").stdin(Stdio::piped()).stdout(Stdio::piped());
        let child = if own_netns {
            link::spawn(&mut command)?
        } else {
            command.spawn().context("start an agent")?
        };
        Self::of(name, None, child, notices)
    }

    /// Starts an agent on another host by a command that reaches it.
    pub(super) fn start_by(
        command: &mut Command,
        name: &'static str,
        host: &'static str,
        notices: Sender<String>,
    ) -> anyhow::Result<Self> {
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        Self::of(name, Some(host), child.context("start ssh")?, notices)
    }

    fn of(
        name: &'static str,
        host: Option<&'static str>,
        mut child: Child,
        notices: Sender<String>,
    ) -> anyhow::Result<Self> {
        let orders = Orders(Arc::new(Mutex::new(child.stdin.take())));
        let said = child.stdout.take().context("an agent's stdout")?;
        let (heard, answers) = mpsc::channel();
        thread::spawn(move || hear(said, &heard, &notices));
        let (alive, ended) = mpsc::channel();
        if host.is_some() {
            let orders = orders.clone();
            thread::spawn(move || orders.ping(&ended));
        }
        Ok(Self {
            name,
            host,
            child,
            orders,
            answers,
            _alive: alive,
        })
    }

    pub(super) fn order(&mut self, order: &Order) -> anyhow::Result<()> {
        self.orders.send(order).with_context(|| self.death())
    }

    pub(super) fn answer(&mut self) -> anyhow::Result<Answer> {
        let Ok(answer) = self.answers.recv() else {
            bail!(self.death());
        };
        match answer.with_context(|| format!("hear the {self}"))? {
            Answer::Failed(reason) => bail!("{self}: {reason}"),
            answer => Ok(answer),
        }
    }

    pub(super) fn ask(&mut self, order: &Order) -> anyhow::Result<Answer> {
        self.order(order)?;
        self.answer()
    }

    /// What became of it, if it has ended.
    pub(super) fn has_ended(&mut self) -> anyhow::Result<Option<String>> {
        Ok(self.child.try_wait()?.map(|status| self.fate(status)))
    }

    fn fate(&self, status: ExitStatus) -> String {
        match self.host {
            // What ssh ends with when it is not the other side's program that ended.
            Some(host) if status.code() == Some(255) || status.code().is_none() => format!(
                "the connection to the {self} was lost; it ends what it records and keeps it on the {host}: `cargo xtask fetch` brings it \
                 home"
            ),
            _ => format!("the {self} died ({status}); what it recorded before is kept"),
        }
    }

    /// What became of an agent that no longer answers.
    fn death(&mut self) -> String {
        // It closed its end, so it is ending; waiting tells how.
        match self.child.wait() {
            Ok(status) => self.fate(status),
            Err(error) => format!("the {self} does not answer ({error})"),
        }
    }

    /// The first words with it.
    pub(super) fn hello(&mut self, silence_ms_max: Option<u64>, watch_host: bool) -> anyhow::Result<Met> {
        let hello = Order::Hello {
            protocol: PROTOCOL,
            silence_ms_max,
            watch_host,
        };
        match self.ask(&hello)? {
            Answer::Hello { met, .. } => Ok(*met),
            other => Err(self.surprise(&other)),
        }
    }

    pub(super) fn threads(&mut self, order: &Order) -> anyhow::Result<Vec<u32>> {
        match self.ask(order)? {
            Answer::Threads(threads) => Ok(threads),
            other => Err(self.surprise(&other)),
        }
    }

    pub(super) fn surprise(&self, answer: &Answer) -> anyhow::Error {
        anyhow!("the {self} answered {answer:?}, which was not asked")
    }
}

impl std::fmt::Display for Agent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)?;
        match self.host {
            Some(host) if host != self.name => write!(f, " on the {host}"),
            _ => Ok(()),
        }
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        // The end of its orders lets it finish its recording; only one that does not end is killed.
        drop(self.orders.pipe().take());
        let deadline = Instant::now() + END_MAX;
        while Instant::now() < deadline {
            match self.child.try_wait() {
                Ok(None) => thread::sleep(END_POLL),
                _ => return,
            }
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Hands on what an agent says, until it says nothing more.
fn hear(said: ChildStdout, answers: &Sender<anyhow::Result<Answer>>, notices: &Sender<String>) {
    for line in BufReader::new(said).lines() {
        let heard = line.map_err(anyhow::Error::from).and_then(|line| {
            serde_json::from_str::<Answer>(&line).with_context(|| format!("it said '{}'", line.trim()))
        });
        let is_heard = match heard {
            Ok(Answer::Notice(notice)) => notices.send(notice).is_ok(),
            heard => answers.send(heard).is_ok(),
        };
        if !is_heard {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agent_elsewhere_hears_of_a_controller_that_is_busy_with_another() {
        let notice = serde_json::to_string(&Answer::Notice("heard".to_owned())).unwrap();
        let mut listener = Command::new("sh");
        listener.arg("-c").arg(format!("read -r word && echo '{notice}'"));
        let (tell, notices) = mpsc::channel();
        let agent = Agent::start_by(&mut listener, "listener", "host", tell).unwrap();
        assert_eq!(notices.recv().unwrap(), "heard");
        drop(agent);
    }
}
