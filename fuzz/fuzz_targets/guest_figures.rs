//! What a guest answers to the question what it uses.
#![no_main]

use libfuzzer_sys::fuzz_target;
use space_node_manager::GroupUsage;

// The parser alone: its crate brings a database and a server.
#[expect(dead_code, reason = "the history of samples is no parser")]
#[path = "../../crates/node/src/usage.rs"]
mod usage;

/// What the module above takes from its crate.
mod seam {
    #[derive(Debug, Clone, PartialEq)]
    pub struct Usage {
        pub at: jiff::Timestamp,
        pub cpu_count: u32,
        pub cpu_used_pct: f64,
        pub mem_total: u64,
        pub mem_used: u64,
        pub mem_cache: u64,
        pub disk_total: u64,
        pub disk_used: u64,
        pub host_cpu_micros: u64,
        pub host_memory_bytes: u64,
    }
}

fn locked<T>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fuzz_target!(|input: &[u8]| {
    if let Ok(figures) = usage::GuestFigures::parse(input) {
        let sample = figures.sample(jiff::Timestamp::UNIX_EPOCH, &GroupUsage::default());
        assert!(sample.cpu_used_pct.is_finite() && sample.cpu_used_pct >= 0.0);
    }
});
