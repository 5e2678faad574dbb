//! The frame and message codecs against hostile bytes.

#![expect(clippy::unwrap_used, reason = "also in the tests' helpers")]

use proptest::{collection::vec, prelude::*};
use space_channel::{
    Activity, Event, Frame, FrameDecoder, GuestControl, GuestMessage, GuestState, Hello, HelloAck,
    HostMessage, Identity, IdentityMode, MessageError, NONCE_LENGTH, Nonce, NonceSearch, Status, decode_any,
    frame::{HEADER_LENGTH, MAX_FRAME, MAX_PAYLOAD},
};

fn frames(pieces: &[&[u8]]) -> Vec<Frame> {
    let mut decoder = FrameDecoder::new();
    let mut found = Vec::new();
    for piece in pieces {
        let mut rest = *piece;
        while let Some(frame) = decoder.next(&mut rest) {
            found.push(frame);
        }
        assert!(rest.is_empty());
    }
    found
}

fn encoded(frame: &Frame) -> Vec<u8> {
    let mut bytes = Vec::new();
    frame.encode(&mut bytes);
    bytes
}

fn hello(nonce: [u8; NONCE_LENGTH]) -> HostMessage {
    HostMessage::Hello(Hello {
        protocol_min: 1,
        protocol_max: 1,
        nonce: Nonce::from_bytes(nonce),
        generation: 7,
    })
}

fn hello_bytes() -> Vec<u8> {
    let mut bytes = Vec::new();
    hello([9; NONCE_LENGTH]).encode(3, &mut bytes).unwrap();
    bytes
}

fn any_frame() -> impl Strategy<Value = Frame> {
    (
        any::<u16>(),
        any::<u16>(),
        any::<u32>(),
        prop_oneof![vec(any::<u8>(), 0..200), vec(any::<u8>(), 0..=MAX_PAYLOAD)],
    )
        .prop_map(|(kind, flags, sequence, payload)| Frame {
            kind,
            flags,
            sequence,
            payload: payload.into(),
        })
}

/// Garbage that is likely to look like the beginning of a frame.
fn garbage() -> impl Strategy<Value = Vec<u8>> {
    let piece = prop_oneof![
        vec(any::<u8>(), 0..40),
        Just(b"S".to_vec()),
        Just(b"SP".to_vec()),
        Just(b"SPC".to_vec()),
        Just(b"SPC1".to_vec()),
        vec(any::<u8>(), 8).prop_map(|mut bytes| {
            bytes.splice(0..0, *b"SPC1");
            bytes.extend_from_slice(&[4, 0, 0, 0, 1, 2, 3, 4, 0, 0, 0, 0]);
            bytes
        }),
    ];
    vec(piece, 0..8).prop_map(|pieces| pieces.concat())
}

fn any_host_message() -> impl Strategy<Value = HostMessage> {
    let identity = (
        any::<(bool, u64, u64, [u8; 16], [u8; 16])>(),
        any::<[u8; 32]>(),
        any::<[u8; 32]>(),
        "[a-zé]{0,31}",
        "[a-f0-9]{0,64}",
    )
        .prop_map(
            |((new, realtime_ns, generation, machine_id, boot_id), low, high, hostname, guest_token)| {
                let mut entropy = [0; 64];
                entropy[..32].copy_from_slice(&low);
                entropy[32..].copy_from_slice(&high);
                HostMessage::Identity(Box::new(Identity {
                    mode: if new {
                        IdentityMode::New
                    } else {
                        IdentityMode::Kept
                    },
                    realtime_ns,
                    entropy,
                    generation,
                    machine_id,
                    boot_id,
                    hostname,
                    guest_token,
                }))
            },
        );
    prop_oneof![
        any::<(u16, u16, [u8; 32], u64)>().prop_map(|(protocol_min, protocol_max, nonce, generation)| {
            HostMessage::Hello(Hello {
                protocol_min,
                protocol_max,
                nonce: Nonce::from_bytes(nonce),
                generation,
            })
        }),
        identity,
        any::<u32>().prop_map(|deadline_ms| HostMessage::Freeze { deadline_ms }),
        any::<u64>().prop_map(|realtime_ns| HostMessage::Thaw { realtime_ns }),
        any::<u64>().prop_map(|realtime_ns| HostMessage::Clock { realtime_ns }),
        Just(HostMessage::Health),
        Just(HostMessage::Shutdown),
        Just(HostMessage::Quiesce),
        Just(HostMessage::Activity),
    ]
}

fn any_guest_message() -> impl Strategy<Value = GuestMessage> {
    let state = prop_oneof![
        Just(GuestState::Booting),
        Just(GuestState::Ready),
        Just(GuestState::Frozen)
    ];
    prop_oneof![
        (any::<(u16, [u8; 32], u64, u64)>(), "[0-9.]{0,32}", state).prop_map(
            |((protocol, nonce, capabilities, generation), daemon_version, state)| {
                GuestMessage::HelloAck(HelloAck {
                    protocol,
                    nonce_echo: Nonce::from_bytes(nonce),
                    daemon_version,
                    capabilities,
                    generation,
                    state,
                })
            }
        ),
        (any::<u32>(), 4_u16.., ".{0,60}").prop_map(|(of_sequence, status, detail)| GuestMessage::Ack {
            of_sequence,
            status: Status::Other(status),
            detail
        }),
        any::<(u32, bool, u32)>().prop_map(|(of_sequence, frozen, micros)| GuestMessage::FreezeAck {
            of_sequence,
            frozen,
            micros
        }),
        any::<(u32, u64, u32)>().prop_map(|(of_sequence, uptime_ms, processes)| GuestMessage::HealthAck {
            of_sequence,
            uptime_ms,
            processes
        }),
        ".{0,60}".prop_map(|detail| GuestMessage::Event(Event::AgentOutOfMemory { detail })),
        any::<(u32, u64, u32, u64, u64, [u32; 3])>().prop_map(
            |(of_sequence, uptime_ms, processes, cpu_micros, io_bytes, [tasks, tunnels, requests])| {
                GuestMessage::ActivityAck {
                    of_sequence,
                    uptime_ms,
                    processes,
                    activity: Activity {
                        cpu_micros,
                        io_bytes,
                        tasks,
                        tunnels,
                        requests,
                    },
                }
            }
        ),
        ".{0,60}".prop_map(|detail| GuestMessage::Event(Event::AgentProcessLimit { detail })),
        (6_u16.., ".{0,60}").prop_map(|(code, detail)| GuestMessage::Event(Event::Other { code, detail })),
        Just(GuestMessage::Event(Event::AgentThawed)),
    ]
}

proptest! {
    #[test]
    fn frames_come_back_between_garbage(sent in vec((garbage(), any_frame()), 1..5), after in garbage()) {
        let mut bytes = Vec::new();
        for (before, frame) in &sent {
            bytes.extend_from_slice(before);
            frame.encode(&mut bytes);
        }
        bytes.extend_from_slice(&after);
        // Garbage may end in what looks like the beginning of a long frame; enough that is none flushes it out.
        bytes.resize(bytes.len() + MAX_FRAME, 0);
        let sent: Vec<Frame> = sent.into_iter().map(|(_, frame)| frame).collect();
        prop_assert_eq!(frames(&[&bytes]), sent);
    }

    #[test]
    fn the_split_of_the_stream_does_not_matter(sent in vec(any_frame(), 1..4), cuts in vec(any::<prop::sample::Index>(), 0..20)) {
        let bytes: Vec<u8> = sent.iter().flat_map(encoded).collect();
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len())).collect();
        cuts.sort_unstable();
        let mut pieces = Vec::new();
        let mut from = 0;
        for cut in cuts {
            pieces.push(&bytes[from..cut]);
            from = cut;
        }
        pieces.push(&bytes[from..]);
        prop_assert_eq!(frames(&pieces), sent);
    }

    #[test]
    fn flipped_bits_never_decode(frame in any_frame(), flips in vec(any::<prop::sample::Index>(), 1..4)) {
        let good = encoded(&frame);
        let mut bytes = good.clone();
        for flip in flips {
            let bit = flip.index(bytes.len() * 8);
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
        prop_assume!(bytes != good);
        prop_assert_eq!(frames(&[&bytes]), Vec::new());
    }

    #[test]
    fn a_cut_frame_never_decodes_and_a_hello_behind_it_is_found_at_once(frame in any_frame(), cut in any::<prop::sample::Index>()) {
        let bytes = encoded(&frame);
        let cut = &bytes[..cut.index(bytes.len())];
        prop_assert_eq!(frames(&[cut]), Vec::new());
        let hello = hello_bytes();
        let found = frames(&[cut, &hello]);
        prop_assert_eq!(found.len(), 1);
        prop_assert_eq!(encoded(&found[0]), hello);
    }

    #[test]
    fn host_messages_come_back(message in any_host_message(), sequence: u32) {
        let mut bytes = Vec::new();
        message.encode(sequence, &mut bytes).unwrap();
        let found = frames(&[&bytes]);
        prop_assert_eq!(found.len(), 1);
        prop_assert_eq!(found[0].sequence, sequence);
        prop_assert_eq!(HostMessage::decode(&found[0]), Ok(message));
        let other_way = matches!(GuestMessage::decode(&found[0]), Err(MessageError::Kind { .. }));
        prop_assert!(other_way);
    }

    #[test]
    fn guest_messages_come_back(message in any_guest_message(), sequence: u32) {
        let mut bytes = Vec::new();
        message.encode(sequence, &mut bytes);
        let found = frames(&[&bytes]);
        prop_assert_eq!(found.len(), 1);
        prop_assert_eq!(GuestMessage::decode(&found[0]), Ok(message));
        let other_way = matches!(HostMessage::decode(&found[0]), Err(MessageError::Kind { .. }));
        prop_assert!(other_way);
    }

    #[test]
    fn a_payload_of_another_length_is_refused(message in any_guest_message(), cut in 1_usize..20, more in vec(any::<u8>(), 1..20)) {
        let mut bytes = Vec::new();
        message.encode(1, &mut bytes);
        let mut frame = frames(&[&bytes]).remove(0);
        let payload = frame.payload.clone();
        frame.payload = payload.slice(..payload.len().saturating_sub(cut));
        prop_assert!(GuestMessage::decode(&frame).is_err());
        frame.payload = [&payload[..], &more].concat().into();
        prop_assert!(GuestMessage::decode(&frame).is_err());
    }

    #[test]
    fn no_parser_panics(input in vec(any::<u8>(), 0..6000), tail in garbage()) {
        decode_any(&input);
        decode_any(&tail);
    }

    #[test]
    fn the_nonce_is_found_like_a_substring(
        nonce in prop_oneof![any::<[u8; NONCE_LENGTH]>(), vec(0_u8..2, NONCE_LENGTH).prop_map(|v| v.try_into().unwrap())],
        before in vec(prop_oneof![Just(None), (0_usize..=NONCE_LENGTH).prop_map(Some)], 0..6),
        filler in vec(0_u8..2, 0..40),
        after in vec(any::<u8>(), 0..40),
        piece in 1_usize..70,
    ) {
        // Prefixes of the nonce, one after the other, then the whole of it.
        let mut stream = Vec::new();
        for part in before {
            match part {
                Some(length) => stream.extend_from_slice(&nonce[..length]),
                None => stream.extend_from_slice(&filler),
            }
        }
        stream.extend_from_slice(&nonce);
        stream.extend_from_slice(&after);
        let expected = stream.windows(NONCE_LENGTH).position(|window| window == nonce).unwrap() + NONCE_LENGTH;
        let mut search = NonceSearch::new(&Nonce::from_bytes(nonce));
        let mut fed = 0;
        let found = stream.chunks(piece).find_map(|chunk| {
            let end = search.feed(chunk).map(|end| fed + end);
            fed += chunk.len();
            end
        });
        prop_assert_eq!(found, Some(expected));
    }
}

#[test]
fn a_frame_is_found_split_at_every_byte() {
    let bytes = [b"SPC1 noise SP".to_vec(), hello_bytes(), hello_bytes()].concat();
    for cut in 0..=bytes.len() {
        let (low, high) = bytes.split_at(cut);
        assert_eq!(frames(&[low, high]).len(), 2, "cut at {cut}");
    }
    let single: Vec<&[u8]> = bytes.chunks(1).collect();
    assert_eq!(frames(&single).len(), 2);
}

#[test]
fn a_flood_of_false_beginnings_is_passed_over_in_bounded_memory() {
    let mut false_beginning = b"SPC1".to_vec();
    false_beginning.resize(HEADER_LENGTH, 0);
    false_beginning[12..16].copy_from_slice(&4096_u32.to_le_bytes());
    let mut flood = false_beginning.repeat(40_000);
    flood.extend_from_slice(&hello_bytes());
    let mut decoder = FrameDecoder::new();
    let mut rest = &flood[..];
    let frame = decoder.next(&mut rest).expect("the hello behind the flood");
    assert_eq!(frame.sequence, 3);
    assert_eq!(decoder.skipped(), 40_000 * HEADER_LENGTH as u64);
}

/// A guest that drips such bytes one by one must not make the host compute the same checksums again for each.
#[test]
fn a_drip_of_false_beginnings_costs_little_per_byte() {
    let mut false_beginning = b"SPC1".to_vec();
    false_beginning.resize(HEADER_LENGTH, 0);
    false_beginning[12..16].copy_from_slice(&4096_u32.to_le_bytes());
    let mut drip = false_beginning.repeat(1000);
    drip.extend_from_slice(&hello_bytes());
    let mut decoder = FrameDecoder::new();
    let begun = std::time::Instant::now();
    let found = drip.iter().find_map(|byte| decoder.next(&mut &[*byte][..]));
    assert_eq!(found.expect("the hello behind the drip").sequence, 3);
    // Without the bound it takes a hundred times as long as with it.
    assert!(
        begun.elapsed() < std::time::Duration::from_secs(5),
        "{:?}",
        begun.elapsed()
    );
}

#[test]
fn a_payload_too_long_for_a_frame_is_garbage() {
    let frame = Frame {
        kind: 1,
        flags: 0,
        sequence: 1,
        payload: vec![1; 4].into(),
    };
    let mut bytes = encoded(&frame);
    bytes[12..16].copy_from_slice(&4097_u32.to_le_bytes());
    bytes.resize(3 * MAX_FRAME, 1);
    assert_eq!(frames(&[&bytes]), Vec::new());
}

#[test]
fn strings_beyond_their_bounds_are_refused_by_the_host_and_cut_by_the_guest() {
    let identity = Identity {
        mode: IdentityMode::New,
        realtime_ns: 1,
        entropy: [1; 64],
        generation: 1,
        machine_id: [1; 16],
        boot_id: [1; 16],
        hostname: "h".repeat(64),
        guest_token: String::new(),
    };
    assert!(
        HostMessage::Identity(Box::new(identity))
            .encode(1, &mut Vec::new())
            .is_err()
    );

    let mut bytes = Vec::new();
    GuestMessage::Ack {
        of_sequence: 1,
        status: Status::Failed,
        detail: "é".repeat(300),
    }
    .encode(1, &mut bytes);
    let decoded = GuestMessage::decode(&frames(&[&bytes])[0]);
    assert_eq!(
        decoded,
        Ok(GuestMessage::Ack {
            of_sequence: 1,
            status: Status::Failed,
            detail: "é".repeat(128)
        })
    );
}

#[test]
fn secrets_are_not_printed() {
    let message = hello([0xab; NONCE_LENGTH]);
    assert!(!format!("{message:?}").contains("171"), "{message:?}");
}

#[test]
fn the_guest_ignores_everything_before_a_hello() {
    let mut bytes = Vec::new();
    HostMessage::Health.encode(1, &mut bytes).unwrap();
    bytes.extend_from_slice(&hello_bytes());
    HostMessage::Health.encode(4, &mut bytes).unwrap();
    let mut guest = GuestControl::new();
    let mut rest = &bytes[..];
    let mut sequences = Vec::new();
    while let Some(request) = guest.next(&mut rest) {
        sequences.push(request.sequence);
    }
    assert_eq!(sequences, [3, 4]);
}

#[test]
fn the_newest_common_protocol_is_agreed_on() {
    let agree = |protocol_min, protocol_max| {
        GuestControl::agree(&Hello {
            protocol_min,
            protocol_max,
            nonce: Nonce::from_bytes([0; 32]),
            generation: 0,
        })
    };
    assert_eq!(agree(1, 1), 1);
    assert_eq!(agree(0, 9), 1);
    assert_eq!(agree(2, 9), 0);
    assert_eq!(agree(0, 0), 0);
}
