//! What the running kernel's BTF says: where struct members lie, and the names of drop reasons.
//!
//! Offsets move between kernel versions and configurations, so none is compiled in. A member that cannot be found
//! is [`ABSENT`] and listed in [`Resolved::missing`]; whoever needs it must do without.

use std::{collections::BTreeMap, path::Path};

use anyhow::{Context as _, anyhow};
use btf_rs::{Btf, BtfType, Struct, Type};
use pqtail_common::{ABSENT, Offsets};

/// The running kernel's own type information.
pub const VMLINUX: &str = "/sys/kernel/btf/vmlinux";

/// Section whose variables exist once per CPU.
const PER_CPU_SECTION: &str = ".data..percpu";

/// arm64 shares `struct pvclock_vcpu_stolen_time { u32 revision, attributes; u64 stolen_time; ... }` with its
/// hypervisor (Arm DEN0057A, section 3.1). The layout is the interface's, not the kernel's.
const ARM_STOLEN_TIME_OFFSET: u32 = 8;

/// Nested anonymous members are followed this deep; the kernel's deepest is below half of it.
const ANONYMOUS_DEPTH_MAX: u32 = 12;

/// Type modifiers and typedefs followed from a member to its struct.
const ALIAS_DEPTH_MAX: u32 = 16;

/// Offsets of the running kernel.
#[derive(Clone, Debug)]
pub struct Resolved {
    /// Byte offsets; [`ABSENT`] where the kernel has no such member.
    pub offsets: Offsets,
    /// Fields of [`Offsets`] that stayed absent, each with the kernel names that were looked for.
    pub missing: BTreeMap<&'static str, String>,
}

/// Reads the running kernel's BTF.
///
/// # Errors
/// When the kernel exposes none: nothing of the kernel can be recorded then.
pub fn open() -> anyhow::Result<Btf> {
    open_at(Path::new(VMLINUX))
}

fn open_at(path: &Path) -> anyhow::Result<Btf> {
    Btf::from_file(path).map_err(|error| anyhow!(error)).with_context(|| {
        format!(
            "read the kernel's type information {}: needs a kernel built with CONFIG_DEBUG_INFO_BTF=y (Debian, \
             Ubuntu, Fedora and Amazon Linux kernels are); record without probes otherwise",
            path.display()
        )
    })
}

/// Looks up every member of [`Offsets`] by name.
#[must_use]
pub fn resolve(btf: &Btf) -> Resolved {
    let mut resolved = Resolved {
        offsets: Offsets::ABSENT,
        missing: BTreeMap::new(),
    };
    macro_rules! find {
        ($($field:ident: $($path:literal)|+;)*) => { $(
            resolved.offsets.$field = [$($path),+]
                .into_iter()
                .find_map(|path| member_offset(btf, path))
                .unwrap_or_else(|| {
                    resolved.missing.insert(stringify!($field), [$($path),+].join(" or "));
                    ABSENT
                });
        )* };
    }
    // Alternatives stand in the order of kernel versions, oldest first: a kernel has only one of them in use.
    find! {
        task_pid: "task_struct.pid";
        task_tgid: "task_struct.tgid";
        task_comm: "task_struct.comm";
        task_prio: "task_struct.prio";
        task_cpu: "task_struct.thread_info.cpu" | "task_struct.cpu";
        task_cfs_rq: "task_struct.se.cfs_rq";
        cfs_rq_rq: "cfs_rq.rq";
        cfs_rq_throttle_count: "cfs_rq.throttle_count";
        rq_cpu: "rq.cpu";
        skb_head: "sk_buff.head";
        skb_data: "sk_buff.data";
        skb_len: "sk_buff.len";
        skb_network_header: "sk_buff.network_header";
        skb_protocol: "sk_buff.protocol";
        skb_dev: "sk_buff.dev";
        device_net: "net_device.nd_net.net";
        net_inum: "net.ns.inum";
        sock_net: "sock_common.skc_net.net";
        sock_family: "sock_common.skc_family";
        sock_local_port: "sock_common.skc_num";
        sock_remote_port: "sock_common.skc_dport";
        sock_local: "sock_common.skc_rcv_saddr";
        sock_remote: "sock_common.skc_daddr";
        sock_local6: "sock_common.skc_v6_rcv_saddr";
        sock_remote6: "sock_common.skc_v6_daddr";
        timer_function: "timer_list.function";
        sock_delayed_ack_timer: "inet_connection_sock.icsk_delack_timer";
        sock_pending: "inet_connection_sock.icsk_pending";
        regs_syscall: "pt_regs.orig_ax" | "pt_regs.syscallno";
        sock_write_timer: "inet_connection_sock.icsk_retransmit_timer" | "sock.tcp_retransmit_timer" | "sock.sk_timer";
    }
    match (
        member_offset(btf, "sk_buff.cb"),
        member_offset(btf, "tcp_skb_cb.seq"),
    ) {
        (Some(block), Some(sequence)) => resolved.offsets.skb_tcp_sequence = block + sequence,
        _ => {
            let looked_for = "sk_buff.cb and tcp_skb_cb.seq".to_owned();
            resolved.missing.insert("skb_tcp_sequence", looked_for);
        }
    }
    resolve_steal(btf, &mut resolved);
    resolved
}

/// The hypervisor's counter is a per-CPU variable whose name and shape depend on the architecture.
fn resolve_steal(btf: &Btf, resolved: &mut Resolved) {
    let variables = per_cpu_variables(btf);
    if let Some(&at) = variables.get("runqueues") {
        resolved.offsets.percpu_runqueues = at;
    } else {
        let looked_for = format!("runqueues in {PER_CPU_SECTION}");
        resolved.missing.insert("percpu_runqueues", looked_for);
    }
    let offsets = &mut resolved.offsets;
    if let (Some(&at), Some(field), Some(version)) = (
        variables.get("steal_time"),
        member_offset(btf, "kvm_steal_time.steal"),
        member_offset(btf, "kvm_steal_time.version"),
    ) {
        offsets.percpu_steal = at;
        offsets.steal_field = field;
        offsets.steal_version = version;
    } else if let (Some(&at), Some(kaddr)) = (
        variables.get("stolen_time_region"),
        member_offset(btf, "pv_time_stolen_time_region.kaddr"),
    ) {
        offsets.percpu_steal = at + kaddr;
        offsets.steal_field = ARM_STOLEN_TIME_OFFSET;
        offsets.steal_version = ABSENT;
    } else {
        let looked_for = format!("steal_time or stolen_time_region in {PER_CPU_SECTION}");
        resolved.missing.insert("percpu_steal", looked_for);
    }
}

/// Names of the running kernel's `enum skb_drop_reason`, without the common prefix; empty before 5.17.
///
/// Reasons of other subsystems (`mac80211`, `openvswitch`) are not in that enum and stay numbers.
#[must_use]
pub fn drop_reasons(btf: &Btf) -> BTreeMap<u32, String> {
    let mut names = BTreeMap::new();
    for found in btf.resolve_types_by_name("skb_drop_reason").unwrap_or_default() {
        let Type::Enum(reasons) = found else { continue };
        for reason in &reasons.members {
            if let Ok(name) = btf.resolve_name(reason) {
                let short = name.strip_prefix("SKB_DROP_REASON_").unwrap_or(&name);
                names.insert(reason.val(), short.to_owned());
            }
        }
    }
    names
}

/// Byte offset of `struct.member.member`, through anonymous structs and unions; `None` if there is no such member
/// or it is a bit field.
#[must_use]
pub fn member_offset(btf: &Btf, path: &str) -> Option<u32> {
    let mut names = path.split('.');
    let outer = names.next()?;
    let names: Vec<&str> = names.collect();
    let found = btf.resolve_types_by_name(outer).ok()?;
    found
        .iter()
        .find_map(|each| match each {
            Type::Struct(outer) | Type::Union(outer) => bit_offset(btf, outer, &names),
            _ => None,
        })
        .and_then(|bits| bits.is_multiple_of(8).then_some(bits / 8))
}

fn bit_offset(btf: &Btf, outer: &Struct, names: &[&str]) -> Option<u32> {
    let (name, rest) = names.split_first()?;
    let (bits, kind) = find_member(btf, outer, name, 0)?;
    if rest.is_empty() {
        return Some(bits);
    }
    match kind {
        Type::Struct(inner) | Type::Union(inner) => Some(bits + bit_offset(btf, &inner, rest)?),
        _ => None,
    }
}

/// Bit offset and type of a member, looking into anonymous members as C does.
fn find_member(btf: &Btf, outer: &Struct, name: &str, depth: u32) -> Option<(u32, Type)> {
    if depth > ANONYMOUS_DEPTH_MAX {
        return None;
    }
    outer.members.iter().find_map(|member| {
        let member_name = btf.resolve_name(member).unwrap_or_default();
        if member_name == name {
            let is_bit_field = member.bitfield_size().is_some_and(|bits| bits != 0);
            return (!is_bit_field).then_some((member.bit_offset(), target(btf, member)?));
        }
        if !member_name.is_empty() {
            return None;
        }
        match target(btf, member)? {
            Type::Struct(inner) | Type::Union(inner) => {
                let (bits, kind) = find_member(btf, &inner, name, depth + 1)?;
                Some((member.bit_offset() + bits, kind))
            }
            _ => None,
        }
    })
}

/// The type behind typedefs and modifiers.
fn target(btf: &Btf, of: &dyn BtfType) -> Option<Type> {
    let mut found = btf.resolve_chained_type(of).ok()?;
    for _ in 0..ALIAS_DEPTH_MAX {
        found = match &found {
            Type::Typedef(alias) => btf.resolve_chained_type(alias).ok()?,
            Type::Const(alias) | Type::Volatile(alias) | Type::Restrict(alias) => {
                btf.resolve_chained_type(alias).ok()?
            }
            Type::TypeTag(alias) => btf.resolve_chained_type(alias).ok()?,
            _ => return Some(found),
        };
    }
    None
}

/// Per-CPU variables by name, with their offset from a CPU's base. pahole before 1.22 leaves them out.
fn per_cpu_variables(btf: &Btf) -> BTreeMap<String, u32> {
    let mut variables = BTreeMap::new();
    for found in btf.resolve_types_by_name(PER_CPU_SECTION).unwrap_or_default() {
        let Type::Datasec(section) = found else { continue };
        for entry in &section.variables {
            if let Ok(Type::Var(variable)) = btf.resolve_chained_type(entry)
                && let Ok(name) = btf.resolve_name(&variable)
            {
                variables.insert(name, entry.offset());
            }
        }
    }
    variables
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `None` on a kernel without BTF, where there is nothing to test.
    fn running_kernel() -> Option<Btf> {
        if Path::new(VMLINUX).exists() {
            return Some(open().expect("BTF exists, so it parses"));
        }
        eprintln!("skipped: this kernel has no {VMLINUX}");
        None
    }

    #[test]
    fn a_kernel_without_type_information_is_an_error_with_a_remedy() {
        let error = open_at(Path::new("/nonexistent/vmlinux"))
            .err()
            .expect("no such file");
        assert!(
            format!("{error:#}").contains("CONFIG_DEBUG_INFO_BTF"),
            "{error:#}"
        );
    }

    #[test]
    fn every_member_needed_for_scheduler_and_packets_resolves() {
        let Some(btf) = running_kernel() else { return };
        let resolved = resolve(&btf);
        let may_miss = [
            "percpu_steal",
            "cfs_rq_throttle_count",
            "task_cfs_rq",
            "sock_local6",
            "sock_remote6",
        ];
        let missing: Vec<_> = resolved
            .missing
            .keys()
            .filter(|name| !may_miss.contains(*name))
            .collect();
        assert!(missing.is_empty(), "{missing:?}");
    }

    #[test]
    fn offsets_obey_what_the_kernel_promises() {
        let Some(btf) = running_kernel() else { return };
        let at = resolve(&btf).offsets;
        // Neighbours by declaration in every supported kernel.
        assert_eq!(at.task_tgid, at.task_pid + 4);
        // inet_sock's address and port pairs are compared as one word each (INET_ADDR_COOKIE, INET_COMBINED_PORTS).
        assert_eq!((at.sock_remote, at.sock_local), (0, 4));
        assert_eq!(at.sock_local_port, at.sock_remote_port + 2);
        // struct timer_list { hlist_node entry; unsigned long expires; function }
        assert_eq!(at.timer_function, 24);
        // tcp_skb_cb.seq is the first member of a block of 48 bytes inside sk_buff.
        assert_eq!(Some(at.skb_tcp_sequence), member_offset(&btf, "sk_buff.cb"));
        assert!(at.skb_data == at.skb_head + 8);
    }

    #[test]
    fn unknown_members_bit_fields_and_scalars_have_no_offset() {
        let Some(btf) = running_kernel() else { return };
        assert_eq!(member_offset(&btf, "task_struct.no_such_member"), None);
        assert_eq!(member_offset(&btf, "no_such_struct.pid"), None);
        assert_eq!(member_offset(&btf, "task_struct.pid.inner"), None);
        assert_eq!(member_offset(&btf, "task_struct.in_execve"), None);
        assert_eq!(member_offset(&btf, "task_struct"), None);
    }

    #[test]
    fn drop_reasons_carry_their_short_names() {
        let Some(btf) = running_kernel() else { return };
        let names = drop_reasons(&btf);
        assert!(names.values().any(|name| name == "NO_SOCKET"), "{names:?}");
        assert!(names.values().all(|name| !name.starts_with("SKB_DROP_REASON")));
    }
}
