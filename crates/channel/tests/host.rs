//! The host's side against a guest played by the test.

#![expect(clippy::unwrap_used, reason = "also in the tests' helpers")]

use std::time::Duration;

use space_channel::{
    Activity, ChannelError, Event, GuestControl, GuestMessage, GuestState, HelloAck, HostControl,
    HostMessage, HostRequest, Identity, IdentityMode, Nonce, Status, capabilities, open_data,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};

const LIMIT: Duration = Duration::from_secs(10);
const SHORT: Duration = Duration::from_millis(50);

struct Guest {
    stream: DuplexStream,
    control: GuestControl,
    pending: Vec<u8>,
}

impl Guest {
    fn new(stream: DuplexStream) -> Self {
        Self {
            stream,
            control: GuestControl::new(),
            pending: Vec::new(),
        }
    }

    async fn request(&mut self) -> Option<HostRequest> {
        loop {
            let mut rest = &self.pending[..];
            let request = self.control.next(&mut rest);
            self.pending = rest.to_vec();
            if request.is_some() {
                return request;
            }
            if self.stream.read_buf(&mut self.pending).await.unwrap() == 0 {
                return None;
            }
        }
    }

    async fn say(&mut self, message: GuestMessage) {
        let mut out = Vec::new();
        self.control.say(&message, &mut out);
        self.stream.write_all(&out).await.unwrap();
    }

    async fn greet(&mut self) -> Nonce {
        let request = self.request().await.unwrap();
        let Ok(HostMessage::Hello(hello)) = request.message else {
            panic!("no hello: {request:?}")
        };
        self.say(hello_ack(hello.nonce, GuestControl::agree(&hello)))
            .await;
        hello.nonce
    }
}

fn hello_ack(nonce_echo: Nonce, protocol: u16) -> GuestMessage {
    GuestMessage::HelloAck(HelloAck {
        protocol,
        nonce_echo,
        daemon_version: "0".into(),
        capabilities: 0,
        generation: 0,
        state: GuestState::Ready,
    })
}

fn ok(of_sequence: u32) -> GuestMessage {
    GuestMessage::Ack {
        of_sequence,
        status: Status::Ok,
        detail: String::new(),
    }
}

fn identity() -> Identity {
    Identity {
        mode: IdentityMode::New,
        realtime_ns: 1,
        entropy: [1; 64],
        generation: 1,
        machine_id: [1; 16],
        boot_id: [1; 16],
        hostname: "h".into(),
        guest_token: "t".into(),
    }
}

#[tokio::test]
async fn requests_are_answered_whatever_their_order() {
    let (host, guest) = tokio::io::duplex(4096);
    let mut guest = Guest::new(guest);
    let guest = tokio::spawn(async move {
        guest.greet().await;
        let first = guest.request().await.unwrap();
        let second = guest.request().await.unwrap();
        for request in [second, first] {
            match request.message.unwrap() {
                HostMessage::Health => {
                    guest
                        .say(GuestMessage::HealthAck {
                            of_sequence: request.sequence,
                            uptime_ms: 5,
                            processes: 2,
                        })
                        .await;
                }
                HostMessage::Freeze { deadline_ms: 20 } => {
                    guest
                        .say(GuestMessage::FreezeAck {
                            of_sequence: request.sequence,
                            frozen: true,
                            micros: 300,
                        })
                        .await;
                }
                other => panic!("{other:?}"),
            }
        }
        guest.say(GuestMessage::Event(Event::AgentThawed)).await;
        let third = guest.request().await.unwrap();
        guest
            .say(GuestMessage::Ack {
                of_sequence: third.sequence,
                status: Status::Failed,
                detail: "no disk".into(),
            })
            .await;
        guest
    });
    let (control, ack) = HostControl::connect(host, 3, LIMIT).await.unwrap();
    assert_eq!(ack.protocol, 1);
    let mut events = control.take_events().unwrap();
    let (health, freeze) = tokio::join!(
        control.health(LIMIT),
        control.freeze(Duration::from_millis(20), LIMIT)
    );
    assert_eq!(health.unwrap().processes, 2);
    let freeze = freeze.unwrap();
    assert!(freeze.frozen);
    assert_eq!(freeze.took, Duration::from_micros(300));
    assert_eq!(events.recv().await, Some(Event::AgentThawed));
    let error = control.quiesce(LIMIT).await.unwrap_err();
    assert!(
        matches!(&error, ChannelError::Refused { detail, .. } if detail == "no disk"),
        "{error}"
    );
    drop(guest.await.unwrap());
    assert!(matches!(
        control.health(LIMIT).await,
        Err(ChannelError::Closed { .. })
    ));
    control.closed().await;
}

#[tokio::test]
async fn the_hello_waits_in_the_stream_until_the_guest_runs() {
    let (host, guest) = tokio::io::duplex(4096);
    let control = HostControl::open(host, 3).unwrap();
    assert!(matches!(
        control.greeted(SHORT).await,
        Err(ChannelError::TimedOut { .. })
    ));
    let guest = tokio::spawn(async move {
        let mut guest = Guest::new(guest);
        let nonce = guest.greet().await;
        let request = guest.request().await.unwrap();
        guest.say(ok(request.sequence)).await;
        (guest, nonce)
    });
    control.identity(identity(), LIMIT).await.unwrap();
    control.greeted(LIMIT).await.unwrap();
    assert_eq!(guest.await.unwrap().1, *control.nonce());
}

/// Daemons live in templates and snapshots: an old one is asked what it understands, a newer one what it can tell.
#[tokio::test]
async fn what_the_agent_does_is_asked_only_of_a_daemon_that_can_tell() {
    let busy = Activity {
        cpu_micros: 7,
        io_bytes: 1 << 40,
        tasks: 3,
        tunnels: 2,
        requests: 1,
    };
    for (can, expected) in [(0, None), (capabilities::ACTIVITY, Some(busy))] {
        let (host, guest) = tokio::io::duplex(4096);
        let mut guest = Guest::new(guest);
        let asked = tokio::spawn(async move {
            let (control, _) = HostControl::connect(host, 3, LIMIT).await.unwrap();
            control.health(LIMIT).await.unwrap()
        });
        let Ok(HostMessage::Hello(hello)) = guest.request().await.unwrap().message else {
            panic!("no hello")
        };
        let mut ack = hello_ack(hello.nonce, 1);
        if let GuestMessage::HelloAck(ack) = &mut ack {
            ack.capabilities = can;
        }
        guest.say(ack).await;
        let request = guest.request().await.unwrap();
        let (of_sequence, uptime_ms, processes) = (request.sequence, 5, 2);
        let answer = match request.message.unwrap() {
            HostMessage::Health => GuestMessage::HealthAck {
                of_sequence,
                uptime_ms,
                processes,
            },
            HostMessage::Activity => GuestMessage::ActivityAck {
                of_sequence,
                uptime_ms,
                processes,
                activity: busy,
            },
            other => panic!("{other:?}"),
        };
        guest.say(answer).await;
        let report = asked.await.unwrap();
        assert_eq!((report.processes, report.activity), (2, expected));
    }
}

/// A restored guest's port still holds what its earlier life said; none of it may count.
#[tokio::test]
async fn frames_before_the_matching_hello_ack_are_discarded() {
    let (host, guest) = tokio::io::duplex(64 * 1024);
    let mut guest = Guest::new(guest);
    let mut stale = Vec::new();
    guest.control.say(&ok(1), &mut stale);
    guest
        .control
        .say(&hello_ack(Nonce::from_bytes([7; 32]), 1), &mut stale);
    guest.control.say(&ok(1), &mut stale);
    let half = stale.len() - 5;
    guest.stream.write_all(&stale[..half]).await.unwrap();
    let control = HostControl::open(host, 3).unwrap();
    let asked = tokio::spawn(async move { (control.identity(identity(), LIMIT).await, control) });
    let nonce_request = guest.request().await.unwrap();
    assert!(matches!(nonce_request.message, Ok(HostMessage::Hello(_))));
    let request = guest.request().await.unwrap();
    assert!(!asked.is_finished());
    let Ok(HostMessage::Hello(hello)) = nonce_request.message else {
        unreachable!()
    };
    guest.say(hello_ack(hello.nonce, 1)).await;
    guest
        .say(GuestMessage::Ack {
            of_sequence: request.sequence,
            status: Status::Failed,
            detail: "now".into(),
        })
        .await;
    let (outcome, control) = asked.await.unwrap();
    assert!(
        matches!(outcome, Err(ChannelError::Refused { .. })),
        "{outcome:?}"
    );
    control.greeted(LIMIT).await.unwrap();
}

#[tokio::test]
async fn a_guest_of_another_protocol_is_refused() {
    let (host, guest) = tokio::io::duplex(4096);
    let guest = tokio::spawn(async move {
        let mut guest = Guest::new(guest);
        let request = guest.request().await.unwrap();
        let Ok(HostMessage::Hello(hello)) = request.message else {
            panic!("no hello")
        };
        guest.say(hello_ack(hello.nonce, 0)).await;
        guest
    });
    let error = HostControl::connect(host, 3, LIMIT).await.unwrap_err();
    assert!(matches!(error, ChannelError::Protocol { guest: 0 }), "{error}");
    drop(guest.await.unwrap());
}

#[tokio::test]
async fn a_silent_guest_costs_no_more_than_the_limit_and_a_late_answer_is_dropped() {
    let (host, guest) = tokio::io::duplex(4096);
    let mut guest = Guest::new(guest);
    let control = HostControl::open(host, 3).unwrap();
    guest.greet().await;
    assert!(matches!(
        control.health(SHORT).await,
        Err(ChannelError::TimedOut { .. })
    ));
    let late = guest.request().await.unwrap();
    guest
        .say(GuestMessage::HealthAck {
            of_sequence: late.sequence,
            uptime_ms: 1,
            processes: 111,
        })
        .await;
    let (health, ()) = tokio::join!(control.health(LIMIT), async {
        let request = guest.request().await.unwrap();
        guest
            .say(GuestMessage::HealthAck {
                of_sequence: request.sequence,
                uptime_ms: 1,
                processes: 222,
            })
            .await;
    });
    assert_eq!(health.unwrap().processes, 222);
}

#[tokio::test]
async fn an_answer_of_another_kind_is_an_error() {
    let (host, guest) = tokio::io::duplex(4096);
    let mut guest = Guest::new(guest);
    let control = HostControl::open(host, 3).unwrap();
    guest.greet().await;
    let (health, ()) = tokio::join!(control.health(LIMIT), async {
        let request = guest.request().await.unwrap();
        guest.say(ok(request.sequence)).await;
    });
    assert!(matches!(health, Err(ChannelError::Unexpected { what: "health" })));
}

#[tokio::test]
async fn the_data_stream_begins_right_behind_the_nonce() {
    let (host, mut guest) = tokio::io::duplex(1024);
    let nonce = Nonce::from_bytes(*b"0123456789abcdef0123456789ABCDEF");
    let guest = tokio::spawn(async move {
        let mut seen = [0; 32];
        guest.read_exact(&mut seen).await.unwrap();
        // Stale bytes that end in the nonce's own beginning, then the nonce.
        let mut bytes = vec![0x55; 100_000];
        bytes.extend_from_slice(b"0123456789abcdef");
        bytes.extend_from_slice(&seen);
        bytes.extend_from_slice(b"PRI");
        guest.write_all(&bytes).await.unwrap();
        let mut back = [0; 4];
        guest.read_exact(&mut back).await.unwrap();
        back
    });
    let mut stream = open_data(host, &nonce, LIMIT).await.unwrap();
    let mut first = [0; 3];
    stream.read_exact(&mut first).await.unwrap();
    assert_eq!(&first, b"PRI");
    stream.write_all(b"back").await.unwrap();
    assert_eq!(&guest.await.unwrap(), b"back");
}

#[tokio::test]
async fn a_data_port_without_the_nonce_ends_in_a_limit_or_an_end() {
    let nonce = Nonce::from_bytes([1; 32]);
    let (host, _guest) = tokio::io::duplex(1024);
    assert!(matches!(
        open_data(host, &nonce, SHORT).await,
        Err(ChannelError::TimedOut { .. })
    ));
    let (host, guest) = tokio::io::duplex(1024);
    drop(guest);
    assert!(open_data(host, &nonce, LIMIT).await.is_err());
}

/// A guest that says what nobody asked for, as fast as it can: nothing of it is kept, and the questions between are
/// answered.
#[tokio::test]
async fn a_flood_of_lies_neither_fills_memory_nor_hides_an_answer() {
    let (host, guest) = tokio::io::duplex(64 * 1024);
    let mut guest = Guest::new(guest);
    let flood = tokio::spawn(async move {
        let nonce = guest.greet().await;
        let mut lies = Vec::new();
        for number in 0..2000_u32 {
            let detail = "x".repeat(256);
            // A second hello, answers to questions that were not asked, events, half frames and noise.
            guest.control.say(&hello_ack(nonce, 9), &mut lies);
            guest.control.say(&ok(1_000_000 + number), &mut lies);
            let event = GuestMessage::Event(Event::Other { code: 99, detail });
            guest.control.say(&event, &mut lies);
            let whole = lies.len();
            guest.control.say(&ok(number), &mut lies);
            lies.truncate(whole + 20);
            lies.extend_from_slice(b"SPC1\xff\xff\xff\xff noise");
        }
        // What was cut short above is passed over only when a whole frame's worth has come behind it.
        lies.resize(lies.len() + 3 * space_channel::frame::MAX_FRAME, 0);
        guest.stream.write_all(&lies).await.unwrap();
        let request = guest.request().await.unwrap();
        let (uptime_ms, processes) = (1, 7);
        guest
            .say(GuestMessage::HealthAck {
                of_sequence: request.sequence,
                uptime_ms,
                processes,
            })
            .await;
        guest
    });
    let (control, ack) = HostControl::connect(host, 3, LIMIT).await.unwrap();
    assert_eq!(ack.protocol, 1);
    assert_eq!(control.health(LIMIT).await.unwrap().processes, 7);
    // Only as many events as the bound says wait; the flood has cost nothing else.
    drop(flood.await.unwrap());
    let mut events = control.take_events().unwrap();
    let mut kept = 0;
    while events.recv().await.is_some() {
        kept += 1;
    }
    assert_eq!(kept, 64);
}
