//! Hostile input to the reader and the analysis: seeded mutations of what is valid, and every input that once broke something.
//! `cargo xtask fuzz` looks for more.

use std::{fs, path::Path};

use pqtail::analyze::hostile;
use rand::{RngExt as _, SeedableRng as _, rngs::Xoshiro256PlusPlus};

type Feed = fn(&[u8]);

const TARGETS: [(&str, Feed); 3] = [
    ("recording", hostile::read_any),
    ("manifest", hostile::describe_any),
    ("analysis", hostile::analyze_any),
];

/// Mutations of each seed: all of it takes a few seconds.
const MUTATIONS: usize = 40;

const SEED: u64 = 20_261_202;

/// Numbers at which lengths, counts and times may break.
const EDGES: [u64; 8] = [
    0,
    1,
    u64::MAX,
    1 << 63,
    (1 << 62) - 1,
    u32::MAX as u64,
    1 << 20,
    (1 << 20) + 1,
];

fn feed(target: &str) -> Feed {
    let found = TARGETS.iter().find(|(name, _)| *name == target);
    found.expect("a target").1
}

#[test]
fn every_regression_stays_mended() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/regressions");
    for (target, feed) in TARGETS {
        let mut fed = 0;
        for file in fs::read_dir(folder.join(target)).unwrap() {
            let path = file.unwrap().path();
            println!("{}", path.display());
            feed(&fs::read(path).unwrap());
            fed += 1;
        }
        println!("{target}: {fed} inputs");
    }
}

#[test]
fn every_seed_and_its_mutations_are_read_or_refused() {
    let mut random = Xoshiro256PlusPlus::seed_from_u64(SEED);
    let seeds = hostile::seeds();
    for (target, name, seed) in &seeds {
        let feed = feed(target);
        feed(seed);
        for number in 0..MUTATIONS {
            let (_, _, other) = &seeds[random.random_range(0..seeds.len())];
            let input = mutate(seed, other, &mut random);
            // Printed only if the test fails: the last line is the culprit.
            println!("{target} {name} mutation {number}");
            feed(&input);
        }
    }
}

#[test]
fn cut_anywhere_and_with_any_byte_changed_a_recording_is_read_or_refused() {
    for (target, _, seed) in hostile::seeds() {
        if target != "recording" {
            continue;
        }
        for place in 0..seed.len().min(600) {
            hostile::read_any(&seed[..place]);
            let mut changed = seed.clone();
            changed[place] ^= 0xff;
            hostile::read_any(&changed);
        }
    }
}

/// Flips, cuts, splices, moves blocks about and sets numbers to edges, a few of them at once.
fn mutate(seed: &[u8], other: &[u8], random: &mut Xoshiro256PlusPlus) -> Vec<u8> {
    let mut input = seed.to_vec();
    for _ in 0..random.random_range(1..6) {
        let length = input.len();
        if length < 16 {
            input.extend_from_slice(&other[..other.len().min(64)]);
            continue;
        }
        let place = random.random_range(0..length);
        match random.random_range(0..7) {
            0 => input[place] ^= 1 << random.random_range(0..8),
            1 => input[place] = random.random(),
            2 => input.truncate(place),
            3 => {
                let from = random.random_range(0..=other.len());
                let to = (from + random.random_range(0..200)).min(other.len());
                input.splice(place..place, other[from..to].iter().copied());
            }
            4 => {
                let width = [4, 8][random.random_range(0..2)];
                let edge = EDGES[random.random_range(0..EDGES.len())].to_le_bytes();
                let place = place.min(length - width);
                input[place..place + width].copy_from_slice(&edge[..width]);
            }
            5 => {
                // A stretch as long as some whole number of records goes elsewhere.
                let width = (64 * random.random_range(1..4)).min(length - place);
                let stretch: Vec<u8> = input.drain(place..place + width).collect();
                let to = random.random_range(0..=input.len());
                input.splice(to..to, stretch);
            }
            _ => {
                let width = random.random_range(1..64).min(length - place);
                let stretch = input[place..place + width].to_vec();
                input.splice(place..place, stretch);
            }
        }
    }
    input
}
