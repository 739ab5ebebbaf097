package sink

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/outrelay/outrelay/internal/fence"
	"github.com/outrelay/outrelay/internal/kafkawire"
	"github.com/outrelay/outrelay/internal/kafkawire/batch"
	"github.com/outrelay/outrelay/internal/metrics"
)

// Defaults of Config.
const (
	DefaultMaxBatchBytes   = 1<<20 - 1024 // below Kafka's default max.message.bytes, 1 MiB + 12
	DefaultMaxRequestBytes = 4 << 20
	DefaultRequestTimeout  = 10 * time.Second
	DefaultParkAfter       = 5 * time.Second
	DefaultParkBytes       = 32 << 20
)

// Config has the limits of the sinks that an Opener opens.
type Config struct {
	// Compression is none, gzip, snappy, lz4 or zstd. Defaults to none.
	Compression string
	// RequestTimeout is how long a broker may take for a produce request. Defaults to 10 s.
	RequestTimeout time.Duration
	// MaxBatchBytes and MaxRequestBytes bound the size of a batch and of a request, before
	// compression. A topic's max.message.bytes lowers MaxBatchBytes. A record larger than MaxBatchBytes
	// gets a batch without other records. They default to 1 MiB − 1 KiB and 4 MiB.
	MaxBatchBytes, MaxRequestBytes int
	// Lanes is the number of connections to a broker that carry records. Defaults to 1, which is
	// enough for one change stream.
	Lanes int
	// Create has the options of missing topics, which are then created. If it is nil, they are not
	// created, and their records wait.
	Create *kafkawire.TopicCreate
	// ParkAfter is the time after which the records of a target that cannot be written are given back
	// (N11). Defaults to 5 s.
	ParkAfter time.Duration
	// ParkBytes is the memory that all records share. If a target cannot be written and its records
	// hold more than a quarter of it, the target is parked at once. Defaults to 32 MiB.
	ParkBytes int64

	Log     *slog.Logger // Defaults to slog.Default
	Metrics *metrics.Set // Defaults to a set that is not exported
}

// withDefaults returns c with defaults, or an error for negative settings.
func (c Config) withDefaults() (Config, error) {
	negativeSize := c.MaxBatchBytes < 0 || c.MaxRequestBytes < 0 || c.ParkBytes < 0
	if negativeSize || c.Lanes < 0 || c.RequestTimeout < 0 || c.ParkAfter < 0 {
		return c, errors.New("sizes, lanes and time-outs must not be negative")
	}

	c.RequestTimeout = cmp.Or(c.RequestTimeout, DefaultRequestTimeout)
	c.MaxBatchBytes = cmp.Or(c.MaxBatchBytes, DefaultMaxBatchBytes)
	c.MaxRequestBytes = cmp.Or(c.MaxRequestBytes, DefaultMaxRequestBytes)
	c.Lanes = cmp.Or(c.Lanes, 1)
	c.ParkAfter = cmp.Or(c.ParkAfter, DefaultParkAfter)
	c.ParkBytes = cmp.Or(c.ParkBytes, DefaultParkBytes)
	if c.Log == nil {
		c.Log = slog.Default()
	}
	c.Metrics = metrics.OrNew(c.Metrics)
	return c, nil
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

	reopenEvery time.Duration // the constant reopenEvery; tests set another value
	reopened    atomic.Int64  // when a sink last ended on purpose, in Unix nanoseconds
}

// NewOpener returns an opener of sinks that send through client. It does no I/O. The error joins all
// invalid settings.
func NewOpener(cfg Config, client *kafkawire.Client) (*Opener, error) {
	cfg, err := cfg.withDefaults()
	codec, codecErr := batch.ParseCodec(cfg.Compression)
	if err := errors.Join(err, codecErr); err != nil {
		return nil, fmt.Errorf("kafka: %w", err)
	}
	return &Opener{cfg: cfg, kafka: client, fence: fence.NewClient(client), codec: codec, reopenEvery: reopenEvery}, nil
}

// ForSlot returns an opener that shares the connections of o. It has its own log, metrics and memory
// for records: each slot of a watcher gets one (N28).
func (o *Opener) ForSlot(log *slog.Logger, m *metrics.Set, parkBytes int64) *Opener {
	slot := &Opener{
		cfg:         o.cfg,
		kafka:       o.kafka,
		fence:       o.fence,
		codec:       o.codec,
		patience:    o.patience,
		reopenEvery: o.reopenEvery,
	}
	slot.cfg.Log, slot.cfg.Metrics, slot.cfg.ParkBytes = log, metrics.OrNew(m), parkBytes
	return slot
}
