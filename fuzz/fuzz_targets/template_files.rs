//! Recipes, manifests and names of templates, the lists that a host's tools print, and the archives made of them.
#![no_main]

use libfuzzer_sys::fuzz_target;
use space_volume::{Label, Manifest, Recipe, Reference, fuzzing};

fuzz_target!(|input: &[u8]| {
    if let Ok(manifest) = serde_json::from_slice::<Manifest>(input) {
        let bytes = serde_json::to_vec(&manifest).expect("can be written");
        assert_eq!(
            serde_json::from_slice::<Manifest>(&bytes).expect("was written by us"),
            manifest
        );
    }
    fuzzing::module(input);
    fuzzing::archive(input);
    let Ok(text) = std::str::from_utf8(input) else {
        return;
    };
    drop(Recipe::from_toml(text));
    fuzzing::lists(text);
    if let Ok(label) = text.parse::<Label>() {
        assert!(!label.as_str().contains('/') && !label.as_str().starts_with('.'));
    }
    if let Ok(reference) = text.parse::<Reference>() {
        assert_eq!(
            reference
                .to_string()
                .parse::<Reference>()
                .expect("was shown by us"),
            reference
        );
    }
});
