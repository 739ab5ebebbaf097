// Package admin holds the use-cases behind the command line and the HTTP API. Every function reads or writes MongoDB once
// and returns plain values; nothing here prints.
package admin

import (
	"context"
	"fmt"
	"math"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/lease"
)

// Status is the answer of `outrelay status --json`.
type Status struct {
	Watchers []Watcher `json:"watchers"`
}

// Watcher is one slot of one watcher.
type Watcher struct {
	Name        string    `json:"name"`
	Slot        string    `json:"slot"`          // <i>of<N>
	Owner       string    `json:"owner"`         // node and acquisition; "" if nobody owns it
	Node        string    `json:"node"`          // of the owner, or of the last one
	Epoch       int64     `json:"epoch"`         // of the ownership
	ExpiresInMS int64     `json:"expires_in_ms"` // negative: nobody renewed for that long
	State       string    `json:"state"`         // live, taking-over, reopening, blocked, waiting, halted, paused, no-owner …
	Reason      string    `json:"reason,omitempty"`
	LagS        float64   `json:"lag_s"` // now minus commit time of the oldest unresolved envelope, as the owner last saw it
	Rate        float64   `json:"rate"`  // acked records per second
	TokenAgeS   float64   `json:"token_age_s"`
	Unresolved  int       `json:"unresolved"`
	Blocked     []Blocked `json:"blocked"`
	Address     string    `json:"address,omitempty"`
	Version     string    `json:"version,omitempty"`
	Dirty       []string  `json:"dirty,omitempty"` // collections with scheduled or exceptional envelopes

	Paused        bool       `json:"paused,omitempty"`
	Pin           string     `json:"pin,omitempty"`             // the node that it is pinned to
	StepDownUntil *time.Time `json:"step_down_until,omitempty"` // until then the node that stepped down keeps away
	PositionAt    *time.Time `json:"position_at,omitempty"`     // everything that was committed before is settled
	Gap           string     `json:"gap,omitempty"`             // why a stretch of the stream is being swept
	StatsAgeS     float64    `json:"stats_age_s"`               // of lag, rate and what is blocked; −1: there are none
	// OplogHeadroomS is how far the position is from the oldest entry of the oplog; nil where it is not known. At 0 the
	// position is lost.
	OplogHeadroomS *float64 `json:"oplog_headroom_s,omitempty"`
}

// Blocked is a target that waits.
type Blocked struct {
	Topic  string    `json:"topic"`
	Reason string    `json:"reason"`
	Since  time.Time `json:"since"`
	Count  int       `json:"count"`
	Parked bool      `json:"parked"` // its envelopes are held on their documents, and everything else flows
}

// stored is the watcher document with the server's time beside it.
type stored struct {
	lease.Document `bson:",inline"`
	Now            time.Time `bson:"now"`
}

type stats struct {
	At         time.Time `bson:"at"`
	State      string    `bson:"state"`
	Reason     string    `bson:"reason"`
	LagMS      int64     `bson:"lagMs"`
	Rate       float64   `bson:"rate"`
	TokenAgeMS int64     `bson:"tokenAgeMs"`
	Unresolved int       `bson:"unresolved"`
	Blocked    []struct {
		Topic  string    `bson:"topic"`
		Reason string    `bson:"reason"`
		Since  time.Time `bson:"since"`
		Count  int       `bson:"count"`
		Parked bool      `bson:"parked"`
	} `bson:"blocked"`
}

// ReadStatus reads every watcher of the state database, in the order of their names. Ages are by the server's clock.
func ReadStatus(ctx context.Context, state *mongo.Database) (Status, error) {
	s := Status{Watchers: []Watcher{}}
	cur, err := state.Collection("watchers").Aggregate(ctx, mongo.Pipeline{
		{{Key: "$sort", Value: bson.D{{Key: "_id", Value: 1}}}},
		{{Key: "$addFields", Value: bson.D{{Key: "now", Value: "$$NOW"}}}},
	})
	if err != nil {
		return s, fmt.Errorf("reading the watchers of %s: %w", state.Name(), err)
	}
	var docs []stored
	if err := cur.All(ctx, &docs); err != nil {
		return s, fmt.Errorf("reading the watchers of %s: %w", state.Name(), err)
	}
	for i := range docs {
		w, err := docs[i].watcher()
		if err != nil {
			return s, fmt.Errorf("reading watcher %s: %w", docs[i].ID, err)
		}
		s.Watchers = append(s.Watchers, w)
	}
	return s, nil
}

func (d *stored) watcher() (Watcher, error) {
	name, slot, _ := strings.Cut(d.ID, "/")
	w := Watcher{
		Name: name, Slot: slot, Owner: d.Owner, Node: d.Node, Epoch: d.Epoch, Address: d.Address, Version: d.Version,
		ExpiresInMS: d.ExpiresAt.Sub(d.Now).Milliseconds(), Blocked: []Blocked{}, Dirty: d.Dirty,
	}
	var st stats
	if len(d.Stats) > 0 {
		if err := bson.Unmarshal(d.Stats, &st); err != nil {
			return w, err
		}
	}
	w.State, w.Reason, w.LagS, w.TokenAgeS = st.State, st.Reason, seconds(st.LagMS), seconds(st.TokenAgeMS)
	w.Rate, w.Unresolved = math.Round(st.Rate*10)/10, st.Unresolved
	for _, b := range st.Blocked {
		w.Blocked = append(w.Blocked, Blocked(b))
	}
	d.ordered(&w, st.At)
	alive := d.Owner != "" && w.ExpiresInMS > 0
	switch {
	case d.Control.Paused:
		w.State, w.Reason = "paused", "an operator paused it; `outrelay resume` goes on"
	case !alive:
		w.State, w.Reason = "no-owner", "no process runs it; start `outrelay run`"
	}
	if !alive {
		w.Rate = 0
	}
	return w, nil
}

// ordered fills in what operators asked of the slot, and where it stands.
func (d *stored) ordered(w *Watcher, stats time.Time) {
	w.Paused, w.Pin = d.Control.Paused, d.Control.Pin
	if until := d.Control.StepDownUntil; until.After(d.Now) {
		w.StepDownUntil = &until
	}
	if at, ok := d.Position().Time(); ok && at.T > 0 {
		position := time.Unix(int64(at.T), 0).UTC()
		w.PositionAt = &position
	}
	if d.Gap != nil {
		w.Gap = d.Gap.Reason
	}
	if w.StatsAgeS = -1; !stats.IsZero() {
		w.StatsAgeS = max(d.Now.Sub(stats).Seconds(), 0)
	}
}

func seconds(ms int64) float64 { return float64(ms) / 1000 }
