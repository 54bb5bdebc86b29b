//! See [`pqtail::analyze::hostile::describe_any`].
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| pqtail::analyze::hostile::describe_any(bytes));
