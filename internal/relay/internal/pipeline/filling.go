package pipeline

import (
	"time"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/contract/routing"
	"github.com/outrelay/outrelay/internal/relay/activity"
	"github.com/outrelay/outrelay/internal/relay/changes"
	"github.com/outrelay/outrelay/internal/relay/tracing"
)

// recordBuilder builds the records of an envelope. It must be used by one goroutine at a time. It
// reuses its buffers, so that an event costs no allocation.
type recordBuilder struct {
	mapping *envelope.Mapping
	router  *routing.Router
	filler  *routing.Filler
	view    envelope.View // the envelope
	meta    routing.Meta
	targets []routing.Target
}

// BuildConfig contains the parts that build the records of envelopes.
type BuildConfig struct {
	Mapping *envelope.Mapping // nil: the documents are envelopes of the contract
	Router  *routing.Router
	Preset  *routing.Preset
	Scope   *changes.Scope
	Now     func() time.Time // server time
	Tap     *tracing.Tap
	// Activity samples envelopes; nil samples none.
	Activity *activity.Log
}

func (c *BuildConfig) newBuilder() recordBuilder {
	return recordBuilder{mapping: c.Mapping, router: c.Router, filler: c.Preset.Filler()}
}

// follow returns the observer of the delivery of an envelope with these records: its trace and its sample. Usually it has
// neither, and follow returns nil. commitMS is the commit time of its event, or 0 outside of the stream.
func (c *BuildConfig) follow(
	now time.Time, view *envelope.View, recs []record.Record, db, coll []byte, commitMS int64,
) Follower {
	var observers group
	if delivery := c.Tap.Begin(recs, db, coll, commitMS); delivery != nil {
		observers = append(observers, delivery)
	}
	if sample := c.Activity.Sample(now, recs, view, db, coll, commitMS); sample != nil {
		observers = append(observers, sample)
	}

	switch len(observers) {
	case 0:
		return nil
	case 1:
		return observers[0]
	}
	return observers
}

// checkExpiry returns a *record.Rejection if the envelope has expired at now.
func (b *recordBuilder) checkExpiry(now time.Time) error {
	if b.view.HasExpiresAt && now.UnixMilli() > b.view.ExpiresAt {
		return &record.Rejection{Class: record.Expired, Reason: "expiresAt passed before the delivery"}
	}
	return nil
}

// buildRecords appends one record to dst for each target of the envelope. If topics is not nil, it
// builds records only for those topics, also if the routing does not have them or rejects the envelope.
// The records share key, value and headers. rejected contains a result for each of topics that may not
// be written. The error is a *record.Rejection.
func (b *recordBuilder) buildRecords(dst []record.Record, topics []string) (
	_ []record.Record, rejected []record.Result, err error,
) {
	b.targets, err = b.router.Route(&b.view, &b.meta, b.targets[:0])
	// A rule that discards an envelope applies to all topics. Other rejections concern topics that are not asked for.
	if err != nil && (topics == nil || record.RejectionOf(err).Class == record.Dropped) {
		return dst, nil, err
	}
	if topics != nil {
		b.targets, rejected = b.router.RestrictTo(b.targets, topics)
	}
	dst, err = b.fillRecords(dst)
	return dst, rejected, err
}

// fillRecords appends one record to dst for each of b.targets. The error is a *record.Rejection.
func (b *recordBuilder) fillRecords(dst []record.Record) ([]record.Record, error) {
	for i, to := range b.targets {
		dst = append(dst, record.Record{})
		rec := &dst[i]

		// Only the first record is encoded. The others differ from it in their target alone.
		if i > 0 {
			*rec = dst[0]
			rec.Topic = to.Topic
			rec.Partition = to.Partition
			continue
		}
		if err := b.filler.Fill(&b.view, &b.meta, to, rec); err != nil {
			return dst, err
		}
	}
	return dst, nil
}
