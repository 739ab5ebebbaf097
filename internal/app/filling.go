package app

import (
	"bytes"
	"fmt"
	"time"

	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/internal/routing"
	"github.com/outrelay/outrelay/pkg/event"
)

// recordBuilder makes records of an envelope. It is for one goroutine; what it reuses lives in it, so that an event costs no
// allocation.
type recordBuilder struct {
	router  *routing.Router
	filler  *routing.Filler
	view    event.View
	meta    routing.Meta
	targets []routing.Target
	seal    []byte // of the state database, see [store.Registry.Seal]
}

// checkExpiry is the refusal of an envelope that is past its time, nil for any other.
func (f *recordBuilder) checkExpiry(now time.Time) error {
	if f.view.HasExpiresAt && now.UnixMilli() > f.view.ExpiresAt {
		return &record.Refusal{Class: record.Expired, Reason: "expiresAt passed before the delivery"}
	}
	return nil
}

// checkSeal refuses an envelope with a field of the relay that neither a relay nor an operator wrote.
func (f *recordBuilder) checkSeal() error { return checkSeal(&f.view, f.seal) }

func checkSeal(v *event.View, seal []byte) error {
	if v.RelayOwned == nil || bytes.Equal(v.Seal, seal) {
		return nil
	}
	return &record.Refusal{Class: record.Malformed, Reason: fmt.Sprintf(
		"only the relay writes the field %s: leave it out of the insert; if the state database was lost, requeue the letter", v.RelayOwned)}
}

// buildRecords appends one record for each target of the view, or for each of topics if that is not nil; they share key, value
// and headers. refused has an answer for each of topics that may not be written. The error is a *record.Refusal.
func (f *recordBuilder) buildRecords(dst []record.Record, topics []string) (_ []record.Record, refused []record.Answer, err error) {
	if f.targets, err = f.router.Route(&f.view, f.targets[:0]); err != nil {
		return dst, nil, err
	}
	if topics != nil {
		f.targets, refused = f.router.Narrow(f.targets, topics)
	}
	f.meta.Only = f.view.Only
	for i, to := range f.targets {
		dst = append(dst, record.Record{})
		rec := &dst[i]
		if i > 0 {
			*rec = dst[0]
			rec.Topic, rec.Partition = to.Topic, to.Partition
			continue
		}
		if err := f.filler.Fill(&f.view, &f.meta, to, rec); err != nil {
			return dst, nil, err
		}
	}
	return dst, refused, nil
}
