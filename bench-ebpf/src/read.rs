//! Reads of kernel memory at offsets that user space resolved.

use aya_ebpf::helpers::bpf_probe_read_kernel;

/// Reads a `T` at `base + offset`; `None` if the address does not map.
#[inline(always)]
pub(crate) fn field<T>(base: u64, offset: u32) -> Option<T> {
    let at = base.wrapping_add(u64::from(offset)) as *const T;
    // SAFETY: the helper checks the address itself; every T used here is plain integers.
    unsafe { bpf_probe_read_kernel(at) }.ok()
}

/// Follows a pointer member; `None` if it is null or does not map.
#[inline(always)]
pub(crate) fn pointer(base: u64, offset: u32) -> Option<u64> {
    match field::<u64>(base, offset) {
        Some(0) | None => None,
        found => found,
    }
}

/// Loads a `T` from a kernel struct that the tracepoint handed in, without a helper call.
///
/// The verifier knows such a pointer's type and the constant offset, so it turns the load into one that faults
/// safely. Only for pointers that come from the context or from another such load, and for scalars or pointers that
/// lie whole in one member.
#[inline(always)]
pub(crate) fn typed<T>(base: u64, offset: u32) -> T {
    let at = base.wrapping_add(u64::from(offset)) as *const T;
    // SAFETY: the verifier accepts the program only if this is a member of the struct behind `base`.
    unsafe { at.read_volatile() }
}
