package app

import (
	"slices"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/changestream"
	"github.com/outrelay/outrelay/internal/dispatch"
)

// Blocked is a target that waits, as the watcher document shows it to `outrelay status`.
type Blocked struct {
	Topic  string    `bson:"topic"`
	Reason string    `bson:"reason"`
	Since  time.Time `bson:"since"`
	Count  int       `bson:"count"`
	Parked bool      `bson:"parked,omitempty"` // its envelopes are held as exceptions, and everything else flows
	Kind   string    `bson:"-"`                // label of the metric
}

// Stats is what the owner writes with each renewal, so that status needs no way to the process itself.
type Stats struct {
	At         time.Time `bson:"at"`    // when it was taken, by the owner's clock
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

// termStats holds the last Stats of a term.
type termStats struct {
	mu        sync.Mutex
	current   Stats
	halted    string
	updatedAt time.Time
	acked     int64
}

func newTermStats() *termStats {
	return &termStats{current: Stats{State: string(RoleTakeOver), At: time.Now()}}
}

// setHalted makes the state halted until the term ends.
func (v *termStats) setHalted(reason string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.halted, v.current.State, v.current.Reason, v.current.At = reason, string(RoleHalted), reason, time.Now()
}

// rateWindow is the time over which the rate is smoothed.
const rateWindow = 5 * time.Second

func (v *termStats) update(now time.Time, t *term, disp *dispatch.Dispatcher, stream changestream.State, blocked []Blocked) {
	v.mu.Lock()
	defer v.mu.Unlock()
	acked := t.progress.acked.Load()
	if d := now.Sub(v.updatedAt); !v.updatedAt.IsZero() && d > 0 {
		share := min(float64(d)/float64(rateWindow), 1)
		v.current.Rate += share * (float64(acked-v.acked)/d.Seconds() - v.current.Rate)
	}
	v.updatedAt, v.acked = now, acked
	v.current.At, v.current.Acked, v.current.Blocked = now, acked, slices.Clone(blocked)
	v.current.LagMS = disp.Lag(t.clock.now()).Milliseconds()
	v.current.Unresolved, v.current.Bytes = disp.Unresolved()
	v.current.TokenAgeMS = t.tokenAge().Milliseconds()
	v.current.State, v.current.Reason = string(stream.Phase), stream.Reason
	if i := slices.IndexFunc(blocked, func(b Blocked) bool { return !b.Parked }); i >= 0 {
		v.current.State, v.current.Reason = "blocked", blocked[i].Reason
	} else if disp.Waiting() {
		v.current.State, v.current.Reason = "waiting", "the memory budget is full: Kafka takes less than the stream brings"
	}
	if s := t.sweeping.Load(); s != nil {
		v.current.State, v.current.Reason = "sweeping", s.describe(v.current.Reason)
	}
	if v.halted != "" {
		v.current.State, v.current.Reason = string(RoleHalted), v.halted
	}
}

// encode is the stats as they are stored.
func (v *termStats) encode() bson.D {
	v.mu.Lock()
	defer v.mu.Unlock()
	raw, err := bson.Marshal(v.current)
	if err != nil {
		return nil // a struct of plain fields always marshals
	}
	var d bson.D
	if bson.Unmarshal(raw, &d) != nil {
		return nil
	}
	return d
}
