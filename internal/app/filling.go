package app

import (
	"time"

	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/internal/routing"
	"github.com/outrelay/outrelay/pkg/event"
)

// filling makes records of an envelope. It is for one goroutine; what it reuses lives in it, so that an event costs no
// allocation.
type filling struct {
	router  *routing.Router
	filler  *routing.Filler
	view    event.View
	meta    routing.Meta
	targets []routing.Target
}

// expired is the refusal of an envelope that is past its time, nil for any other.
func (f *filling) expired(now time.Time) error {
	if f.view.HasExpiresAt && now.UnixMilli() > f.view.ExpiresAt {
		return &record.Refusal{Class: record.Expired, Reason: "expiresAt passed before the delivery"}
	}
	return nil
}

// records appends one record for each target of the view; they share key, value and headers. Its error is a
// *record.Refusal.
func (f *filling) records(dst []record.Record) ([]record.Record, error) {
	targets, err := f.router.Route(&f.view, f.targets[:0])
	f.targets = targets
	if err != nil {
		return dst, err
	}
	f.meta.Only = f.view.Only
	for i := range targets {
		dst = append(dst, record.Record{})
		rec := &dst[i]
		if i > 0 {
			*rec = dst[0]
			rec.Topic, rec.Partition = targets[i].Topic, targets[i].Partition
			continue
		}
		if err := f.filler.Fill(&f.view, &f.meta, targets[i], rec); err != nil {
			return dst, err
		}
	}
	return dst, nil
}
