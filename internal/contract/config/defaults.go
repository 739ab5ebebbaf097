package config

import (
	"time"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/contract/routing"
)

// Default returns the configuration with all defaults that do not depend on another field or on the host.
func Default() Config {
	return Config{
		Watcher: "default",
		Tasks:   []string{TaskRelay, TaskCleaner, TaskAdmin},
		Slots:   1,
		Start:   Start{},
		MongoDB: MongoDB{ReadPreference: "primary", Indexes: true},
		State:   State{Database: "outrelay", Prefix: "outrelay_"},
		Kafka: Kafka{
			Compression:        "none",
			RequestTimeout:     10 * time.Second,
			TransactionTimeout: time.Minute,
			RequestsPerBroker:  1,
			ReadBack:           ReadBack{Bytes: 2 * GiB, Time: time.Minute},
		},
		Record:      Record{Preset: routing.Typed, JSON: routing.AutoJSON},
		Recording:   "position",
		Retention:   24 * time.Hour,
		Purge:       Purge{Rate: 5000, Batch: 500, Interval: 10 * time.Second},
		Lease:       Lease{TTL: 5 * time.Second, Renew: time.Second, Checkpoint: 250 * time.Millisecond, Drain: 10 * time.Second},
		Retry:       Retry{MaxAttempts: 10, Base: 200 * time.Millisecond, Cap: 5 * time.Minute},
		LostHistory: "sweep",
		Invalidate:  "resume",
		OnDrop:      "discard",
		Expired:     "dead",
		DeadLetters: DeadLetters{Archive: record.LetterArchive, Handlers: []string{record.HandlerDeadLetters}},
		Limits:      Limits{Memory: 32 * MiB, Envelope: record.MaxEnvelope, Record: record.MaxRecord, Tickets: 200_000},
		HTTP:        HTTP{Listen: "127.0.0.1:9464", Readiness: 30 * time.Second},
		OTel:        OTel{SamplePercent: 100, SpansPerSecond: 1000, MetricsInterval: 30 * time.Second},
		Log:         Log{Level: "info", Format: "auto"},
	}
}

// DefaultAdmin returns the defaults of http.admin.
func DefaultAdmin() Admin {
	return Admin{Listen: "127.0.0.1:9465", Anonymous: "none", Payloads: "operator", Rate: 50, Session: 12 * time.Hour}
}
