//! Stub.
/// Stub.
#[derive(Debug)]
pub struct Shaper;
impl Shaper {
    /// Stub.
    /// # Errors
    /// Always.
    pub fn attach(_pid: u32, _device: &str) -> anyhow::Result<Self> {
        anyhow::bail!("stub")
    }
    /// Stub.
    /// # Errors
    /// Always.
    pub fn slow(&self, _rate: u64) -> anyhow::Result<()> {
        anyhow::bail!("stub")
    }
    /// Stub.
    /// # Errors
    /// Always.
    pub fn fast(&self) -> anyhow::Result<()> {
        anyhow::bail!("stub")
    }
}
