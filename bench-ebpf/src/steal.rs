//! The hypervisor's live steal counter of this CPU.
//!
//! `rq->prev_steal_time` is only brought up to date at ticks and does not exist in every kernel, so the shared
//! page itself is read: the run queue's address, minus the per-CPU offset of `runqueues`, plus that of the counter.

use aya_ebpf::{helpers::bpf_get_current_task, macros::map, maps::PerCpuArray};
use pqtail_common::ABSENT;

use crate::{
    read::{field, pointer},
    settings::offset,
};

/// Address of this CPU's counter: 0 not looked for yet, [`NONE`] or [`NONE_TOLD`] not offered.
#[map]
static STEAL_ADDRESS: PerCpuArray<u64> = PerCpuArray::with_max_entries(1, 0);

const NONE: u64 = 1;
const NONE_TOLD: u64 = 2;

/// Whether this CPU turned out to have no counter and nobody was told yet.
#[inline(always)]
pub(crate) fn absence_is_news() -> bool {
    if offset!(percpu_steal) == ABSENT {
        return false;
    }
    let Some(cached) = STEAL_ADDRESS.get_ptr_mut(0) else {
        return false;
    };
    // SAFETY: a per-CPU slot; a racing interrupt would tell it twice at worst.
    unsafe {
        if *cached != NONE {
            return false;
        }
        *cached = NONE_TOLD;
    }
    true
}

/// Steal of `cpu` (which must be this CPU) in ns since boot; `None` where the hypervisor offers no counter.
#[inline(always)]
pub(crate) fn counter_ns(cpu: u32) -> Option<u64> {
    if offset!(percpu_steal) == ABSENT {
        return None;
    }
    let cached = STEAL_ADDRESS.get_ptr_mut(0)?;
    // SAFETY: a per-CPU slot; a racing interrupt would store the same value.
    let mut address = unsafe { *cached };
    if address == 0 {
        address = find(cpu)?;
        // SAFETY: as above.
        unsafe { *cached = address };
    }
    if address <= NONE_TOLD {
        return None;
    }
    field::<u64>(address, 0)
}

#[inline(always)]
fn find(cpu: u32) -> Option<u64> {
    // SAFETY: a plain helper.
    let task = unsafe { bpf_get_current_task() };
    let cfs_rq = pointer(task, offset!(task_cfs_rq))?;
    let rq = pointer(cfs_rq, offset!(cfs_rq_rq))?;
    // A task about to migrate could name another CPU's queue: then try again at the next record.
    if field::<u32>(rq, offset!(rq_cpu))? != cpu {
        return None;
    }
    let variable = rq
        .wrapping_sub(u64::from(offset!(percpu_runqueues)))
        .wrapping_add(u64::from(offset!(percpu_steal)));
    let version = offset!(steal_version);
    if version != ABSENT {
        // Every kernel has the page, whoever runs it. KVM counts its version up whenever the CPU comes back (record_steal_time,
        // arch/x86/kvm/x86.c): with 0, nobody writes to it.
        return Some(match field::<u32>(variable, version)? {
            0 => NONE,
            _ => variable.wrapping_add(u64::from(offset!(steal_field))),
        });
    }
    match field::<u64>(variable, 0)? {
        0 => Some(NONE),
        page => Some(page.wrapping_add(u64::from(offset!(steal_field)))),
    }
}
