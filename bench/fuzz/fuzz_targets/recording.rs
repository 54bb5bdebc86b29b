//! See [`pqtail::analyze::hostile::read_any`].
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| pqtail::analyze::hostile::read_any(bytes));
