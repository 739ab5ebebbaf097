package app

import (
	"slices"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/changestream"
	"github.com/outrelay/outrelay/internal/pipeline"
)

// Blocked is a target that cannot be written, as the watcher document stores it for `outrelay
// status`.
type Blocked struct {
	Topic  string    `bson:"topic"`
	Reason string    `bson:"reason"`
	Since  time.Time `bson:"since"`
	Count  int       `bson:"count"`
	Parked bool      `bson:"parked,omitempty"` // its envelopes wait as exceptions, and all other envelopes are sent
	Kind   string    `bson:"-"`                // label of the metric
}

// Stats are saved by the owner with each renewal, so that `outrelay status` needs no connection to
// the process.
type Stats struct {
	At         time.Time `bson:"at"`    // when they were taken, by the owner's clock
	State      string    `bson:"state"` // taking-over, live, sweeping, reopening, config_error, waiting, halted …
	Reason     string    `bson:"reason,omitempty"`
	LagMS      int64     `bson:"lagMs"`
	Rate       float64   `bson:"rate"` // acked records per second
	TokenAgeMS int64     `bson:"tokenAgeMs"`
	Unresolved int       `bson:"unresolved"` // events above the watermark
	Bytes      int64     `bson:"bytes"`      // of the memory budget in use
	Acked      int64     `bson:"acked"`      // records since the term began
	Blocked    []Blocked `bson:"blocked"`
}

// termStats contains the last Stats of a term. It is safe for concurrent use.
type termStats struct {
	mu        sync.Mutex
	current   Stats
	halted    string // why the term is halted, or ""
	updatedAt time.Time
	acked     int64 // at updatedAt
}

func newTermStats() *termStats {
	return &termStats{current: Stats{State: string(RoleTakeOver), At: time.Now()}}
}

// setHalted sets the state to halted until the term ends.
func (v *termStats) setHalted(reason string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.halted = reason
	v.current.State = string(RoleHalted)
	v.current.Reason = reason
	v.current.At = time.Now()
}

// rateWindow is the time over which the rate is smoothed.
const rateWindow = 5 * time.Second

// update takes the stats of t.
func (v *termStats) update(
	now time.Time, t *term, disp *pipeline.Dispatcher, stream changestream.State, blocked []Blocked,
) {
	v.mu.Lock()
	defer v.mu.Unlock()

	acked := t.progress.acked.Load()
	if d := now.Sub(v.updatedAt); !v.updatedAt.IsZero() && d > 0 {
		share := min(float64(d)/float64(rateWindow), 1)
		v.current.Rate += share * (float64(acked-v.acked)/d.Seconds() - v.current.Rate)
	}
	v.updatedAt = now
	v.acked = acked

	v.current.At = now
	v.current.Acked = acked
	v.current.Blocked = slices.Clone(blocked)
	v.current.LagMS = disp.Lag(t.slot.relay.clock.now()).Milliseconds()
	v.current.Unresolved, v.current.Bytes = disp.Unresolved()
	v.current.TokenAgeMS = t.tokenAge().Milliseconds()

	// The most important state is set last.
	v.current.State, v.current.Reason = string(stream.Phase), stream.Reason
	if i := slices.IndexFunc(blocked, func(b Blocked) bool { return !b.Parked }); i >= 0 {
		v.current.State, v.current.Reason = "blocked", blocked[i].Reason
	} else if disp.Waiting() {
		v.current.State = "waiting"
		v.current.Reason = "the memory budget is full: Kafka is slower than the change stream"
	}
	if s := t.sweeping.Load(); s != nil {
		v.current.State, v.current.Reason = "sweeping", s.describe(v.current.Reason)
	}
	if v.halted != "" {
		v.current.State, v.current.Reason = string(RoleHalted), v.halted
	}
}

// encode returns the stats in the form that the watcher document stores.
func (v *termStats) encode() bson.D {
	v.mu.Lock()
	defer v.mu.Unlock()

	// Neither call fails for a struct of plain fields.
	raw, err := bson.Marshal(v.current)
	if err != nil {
		return nil
	}
	var d bson.D
	if bson.Unmarshal(raw, &d) != nil {
		return nil
	}
	return d
}
