//! Stub.
use std::time::Duration;
/// Stub.
#[derive(Debug)]
pub struct Flood;
impl Flood {
    /// Stub.
    /// # Errors
    /// Always.
    pub fn prepare(_cpu: u32, _from: u32) -> anyhow::Result<Self> {
        anyhow::bail!("stub")
    }
    /// Stub.
    /// # Errors
    /// Always.
    pub fn burst(&mut self, _length: Duration) -> anyhow::Result<(u64, u64)> {
        anyhow::bail!("stub")
    }
}
