//! See [`pqtail::analyze::hostile::analyze_any`].
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| pqtail::analyze::hostile::analyze_any(bytes));
