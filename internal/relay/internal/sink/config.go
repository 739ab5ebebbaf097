package sink

import (
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/outrelay/outrelay/internal/base/metrics"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/kafkawire"
	"github.com/outrelay/outrelay/internal/kafkawire/batch"
	"github.com/outrelay/outrelay/internal/relay/internal/fence"
)

// limits are the bounds of a sink that users cannot configure. Only tests replace [fixedLimits].
type limits struct {
	// batchBytes and requestBytes bound the size of a batch and of a request, before compression. A
	// topic's max.message.bytes lowers batchBytes. A record larger than batchBytes gets a batch without
	// other records.
	batchBytes, requestBytes int

	// parkAfter is the time after which the records of a target that cannot be written are given back (N11).
	parkAfter time.Duration

	// reopenEvery bounds how often a sink ends on purpose, for a read-back or for another transactional
	// id. A partition that fails again and again stops the others for one takeover in this time.
	reopenEvery time.Duration

	// deletedTopics is the number of deleted topics at which a sink ends, so that the takeover forgets them. deletedFor is the time
	// after which one is enough.
	deletedTopics int
	deletedFor    time.Duration
}

var fixedLimits = limits{
	batchBytes:    1<<20 - 1024, // below Kafka's default max.message.bytes, 1 MiB + 12
	requestBytes:  kafkawire.MaxRequestBytes,
	parkAfter:     5 * time.Second,
	reopenEvery:   30 * time.Second,
	deletedTopics: 100,
	deletedFor:    24 * time.Hour,
}

// Config has the settings of the sinks that an Opener opens. internal/contract/config has their defaults and limits.
type Config struct {
	// Compression is none, gzip, snappy, lz4 or zstd.
	Compression string
	// RequestTimeout is how long a broker may take for a produce request.
	RequestTimeout time.Duration
	// RequestsPerBroker is the number of connections to a broker that carry records. One is enough for one change
	// stream.
	RequestsPerBroker int
	// Create has the options of missing topics, which are then created. If it is nil, they are not
	// created, and their records wait.
	Create *kafkawire.TopicCreate
	// ParkBytes is the memory that all records share. If a target cannot be written and its records
	// hold more than a quarter of it, the target is parked at once.
	ParkBytes int64

	Log     *slog.Logger
	Metrics *metrics.Set // Defaults to a set that is not exported
}

// check returns an error for a setting that is missing or negative.
func (c Config) check() error {
	if c.RequestTimeout <= 0 || c.RequestsPerBroker <= 0 || c.ParkBytes <= 0 {
		return errors.New("the timeout, the requests per broker and the memory must be positive")
	}
	return nil
}

// Opener opens the sinks of one slot, one after another. It is safe for concurrent use.
type Opener struct {
	cfg   Config
	kafka *kafkawire.Client
	fence *fence.Client
	codec *batch.Codec

	// patience is the least time of each step of a takeover. Tests set it, so that a slow server does
	// not count as failed.
	patience time.Duration

	limits   limits
	reopened atomic.Pointer[time.Time] // when a sink last ended on purpose; nil: never
	learned  learnedLimits
	tickets  ticketLists

	// omitsTimes is set once a broker has appended a batch and returned no time, as Kafka does unless it sets the timestamps.
	omitsTimes atomic.Bool
}

// NewOpener returns an opener of sinks that send through client. It does no I/O. The error joins all
// invalid settings.
func NewOpener(cfg Config, client *kafkawire.Client) (*Opener, error) {
	codec, codecErr := batch.ParseCodec(cfg.Compression)
	if err := errors.Join(cfg.check(), codecErr); err != nil {
		return nil, fmt.Errorf("kafka: %w", err)
	}
	cfg.Metrics = metrics.OrNew(cfg.Metrics)
	return &Opener{cfg: cfg, kafka: client, fence: fence.NewClient(client), codec: codec, limits: fixedLimits}, nil
}

// Recycle takes back a ticket slice that a sink of o has passed to Acked. It does not block.
func (o *Opener) Recycle(list []record.Ticket) { o.tickets.put(list) }

// ForSlot returns an opener that shares the connections of o. It has its own log, metrics and memory
// for records: each slot of a watcher gets one (N28).
func (o *Opener) ForSlot(log *slog.Logger, metricSet *metrics.Set, parkBytes int64) *Opener {
	slot := &Opener{
		cfg:      o.cfg,
		kafka:    o.kafka,
		fence:    o.fence,
		codec:    o.codec,
		patience: o.patience,
		limits:   o.limits,
	}
	slot.cfg.Log, slot.cfg.Metrics, slot.cfg.ParkBytes = log, metrics.OrNew(metricSet), parkBytes
	return slot
}
