package problems

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
)

// Status is the output of `outrelay status --json`.
type Status struct {
	Slots []SlotStatus `json:"slots"`
}

// SlotStatus is one slot of one watcher.
type SlotStatus struct {
	Name        string            `json:"name"`
	Slot        string            `json:"slot"`          // <i>of<N>
	Owner       string            `json:"owner"`         // node and acquisition; "" if there is no owner
	Node        string            `json:"node"`          // of the owner, or of the last one
	Epoch       int64             `json:"epoch"`         // of the lease
	ExpiresInMS int64             `json:"expires_in_ms"` // negative if the lease has expired
	State       string            `json:"state"`         // such as live, taking-over, unwritable, waiting, halted, pausing, paused, no-owner
	Reason      string            `json:"reason,omitempty"`
	LagS        *float64          `json:"lag_s,omitempty"` // age of the oldest event of the stream that is neither acked nor stored as waiting or dead; nil if unknown
	Rate        float64           `json:"rate"`            // acked records per second
	TokenAgeS   float64           `json:"token_age_s"`
	Unresolved  int               `json:"unresolved"`
	Unwritable  []UnwritableTopic `json:"unwritable"` // the topics that cannot be written
	Problems    []SlotProblem     `json:"problems"`   // of the owner, as its /readyz reports them
	Address     string            `json:"address,omitempty"`
	Version     string            `json:"version,omitempty"`

	Paused        bool       `json:"paused,omitempty"`
	PausedAt      *time.Time `json:"paused_at,omitempty"`
	PausedBy      string     `json:"paused_by,omitempty"`       // a person, or the command that pauses
	Pin           string     `json:"pin,omitempty"`             // the node that it is pinned to
	StepDownUntil *time.Time `json:"step_down_until,omitempty"` // until then StepDownNode does not acquire it
	StepDownNode  string     `json:"step_down_node,omitempty"`  // the node that has stepped down; "" means every node
	PositionAt    *time.Time `json:"position_at,omitempty"`     // everything that was committed before is settled
	Gap           string     `json:"gap,omitempty"`             // the cause of a gap that is being swept
	StatsAgeS     float64    `json:"stats_age_s"`               // age of the owner's report; −1 if there is none
	// Incidents have happened in the last seven days, and no operator has acknowledged them.
	Incidents []Incident `json:"incidents"`
	// OplogHeadroomS is the time between the oldest entry of the oplog and the position, or nil if
	// it is unknown. At 0 the position is lost.
	OplogHeadroomS *float64 `json:"oplog_headroom_s,omitempty"`
}

// UnwritableTopic is a topic that cannot be written.
type UnwritableTopic struct {
	Topic  string    `bson:"topic" json:"topic"`
	Kind   string    `bson:"kind" json:"kind"` // missing, too_small, forbidden, no_leader, rejected, unreachable, quarantined, opening or throttled
	Reason string    `bson:"reason" json:"reason"`
	Since  time.Time `bson:"since" json:"since"`
	Count  int       `bson:"count" json:"count"`
	ForS   float64   `bson:"-" json:"for_s"`       // seconds since then, until the owner's report
	Parked bool      `bson:"parked" json:"parked"` // its envelopes are parked, so that other envelopes are sent
	// Partitions is the number of partitions that a missing or too small topic needs, because records were written to them; 0: any.
	Partitions int `bson:"partitions" json:"partitions,omitempty"`
}

// SlotProblem is a step of the owner that fails and is repeated.
type SlotProblem struct {
	Part   string    `bson:"part" json:"part"`               // such as stream, ledger, mongodb, kafka
	Object string    `bson:"object" json:"object,omitempty"` // "", or the object that the step fails for
	Text   string    `bson:"text" json:"text"`
	Since  time.Time `bson:"since" json:"since"`
	ForS   float64   `bson:"-" json:"for_s"` // seconds since then, until the owner's report
}

// Incident is something that has happened to events of the slot. It has one of the fields Lost and Discarded.
type Incident struct {
	ID        string       `json:"id"` // for Acknowledge
	At        time.Time    `json:"at"` // when it was over, by the server's clock
	Lost      *LostHistory `json:"lost,omitempty"`
	Discarded *Discarded   `json:"discarded,omitempty"`
}

// Discarded counts the events that are not sent because their collection was dropped. Events waited or were claimed, and the owner has removed
// them.
type Discarded struct {
	NS        string `json:"ns"` // the collection, or the database if all of it was dropped
	Events    int64  `json:"events"`
	Scheduled int64  `json:"scheduled"` // further ones, which were in the collection at the last count before the drop
}

// LostHistory is a range of the change stream that MongoDB had discarded before the owner read it. The owner has sent the events of the
// range from the outboxes.
type LostHistory struct {
	From    *time.Time `json:"from,omitempty"` // begin of the range; nil if the position belonged to another history, so everything was swept
	To      time.Time  `json:"to"`             // end of the range
	Reason  string     `json:"reason"`
	Swept   int64      `json:"swept"`   // events that were sent from the outboxes
	Repeats int64      `json:"repeats"` // at most so many of them had been sent before
}

// watcherDocument is a watcher document with the server time.
type watcherDocument struct {
	lease.Document `bson:",inline"`
	Now            time.Time `bson:"now"`
}

// storedStats is the report of the owner in the watcher document.
type storedStats struct {
	At         time.Time         `bson:"at"`
	State      string            `bson:"state"`
	Reason     string            `bson:"reason"`
	LagMS      *int64            `bson:"lagMs"` // nil if the owner does not deliver
	Rate       float64           `bson:"rate"`
	TokenAgeMS int64             `bson:"tokenAgeMs"`
	Unresolved int               `bson:"unresolved"`
	Unwritable []UnwritableTopic `bson:"unwritable"`
	Problems   []SlotProblem     `bson:"problems"`
}

// ReadStatus returns every slot of every watcher of the state database, sorted by id. Ages are
// measured by the server's clock.
func ReadStatus(ctx context.Context, state state.Database) (Status, error) {
	status := Status{Slots: []SlotStatus{}}
	docs, err := mongodb.AggregateAll[watcherDocument](ctx, state.Collection("watchers"), "reading the watchers of "+state.Name(), mongo.Pipeline{
		{{Key: "$sort", Value: bson.D{{Key: "_id", Value: 1}}}},
		{{Key: "$addFields", Value: bson.D{{Key: "now", Value: "$$NOW"}}}},
	})
	if err != nil {
		return status, err
	}

	for i := range docs {
		slot, err := docs[i].toSlotStatus()
		if err != nil {
			return status, fmt.Errorf("reading watcher %s: %w", docs[i].ID, err)
		}
		status.Slots = append(status.Slots, slot)
	}
	return status, nil
}

func (d *watcherDocument) toSlotStatus() (SlotStatus, error) {
	name, slot, _ := strings.Cut(d.ID, "/")
	status := SlotStatus{
		Name:        name,
		Slot:        slot,
		Owner:       d.Owner,
		Node:        d.Node,
		Epoch:       d.Epoch,
		Address:     d.Address,
		Version:     d.Version,
		ExpiresInMS: d.ExpiresAt.Sub(d.Now).Milliseconds(),
	}

	var stats storedStats
	if len(d.Stats) > 0 {
		if err := bson.Unmarshal(d.Stats, &stats); err != nil {
			return status, err
		}
	}
	status.State = stats.State
	status.Reason = stats.Reason
	status.LagS = d.knownLag(stats.LagMS)
	status.TokenAgeS = toSeconds(stats.TokenAgeMS)
	status.Rate = math.Round(stats.Rate*10) / 10
	status.Unresolved = stats.Unresolved
	status.Incidents = []Incident{}
	status.Unwritable = append([]UnwritableTopic{}, stats.Unwritable...)
	status.Problems = append([]SlotProblem{}, stats.Problems...)
	for i := range status.Problems {
		// Both times are of the owner's clock.
		status.Problems[i].ForS = max(stats.At.Sub(status.Problems[i].Since).Seconds(), 0)
	}
	for i := range status.Unwritable {
		status.Unwritable[i].ForS = max(stats.At.Sub(status.Unwritable[i].Since).Seconds(), 0)
	}
	status.StatsAgeS = -1
	if !stats.At.IsZero() {
		status.StatsAgeS = max(d.Now.Sub(stats.At).Seconds(), 0)
	}

	// Orders of operators are in the document, while the report is from before them.
	d.addControl(&status)

	for _, incident := range d.Incidents {
		if d.Now.Sub(incident.At) < incidentsFor {
			status.Incidents = append(status.Incidents, newIncident(incident))
		}
	}

	// The last report may be that of an owner that is gone.
	alive := status.HasOwner()
	switch {
	case d.Control.Paused && alive:
		// Until the owner has drained, new events still go to Kafka. An operator who moves the watcher elsewhere has to wait.
		status.State, status.Reason = "pausing", status.describePause()+"; its owner sends events until its next renewal, then waits for Kafka's acknowledgements and releases the lease"
	case d.Control.Paused:
		status.State, status.Reason = "paused", status.describePause()+"; `outrelay resume` ends the pause"
	case !alive:
		status.State, status.Reason = "no-owner", "no process has its lease; see the problems"
	}
	// The rate and the problems in the report of a dead owner are history.
	if !alive {
		status.Rate, status.Problems = 0, []SlotProblem{}
	}
	return status, nil
}

// knownLag returns the lag that the owner has reported, in seconds, or nil if it is unknown: while no owner delivers, events may wait, and
// no process measures their age.
func (d *watcherDocument) knownLag(reportedMS *int64) *float64 {
	ttl := time.Duration(d.TTLMS) * time.Millisecond
	renewedAt := d.ExpiresAt.Add(-ttl)
	// The report that an acquisition finds is from the owner before. A live owner renews at least three times in a TTL.
	if reportedMS == nil || d.Owner == "" || !renewedAt.After(d.AcquiredAt) || d.Now.Sub(renewedAt) > ttl/2 {
		return nil
	}
	lag := toSeconds(*reportedMS)
	return &lag
}

// HasOwner reports whether a process holds the lease.
func (w *SlotStatus) HasOwner() bool { return w.Owner != "" && w.ExpiresInMS > 0 }

// describePause returns who paused the slot, as a clause.
func (w *SlotStatus) describePause() string { return cmp.Or(w.PausedBy, "an operator") + " paused it" }

// addControl adds the requests of operators, the position and the gap of the slot.
func (d *watcherDocument) addControl(slot *SlotStatus) {
	slot.Paused, slot.PausedBy = d.Control.Paused, d.Control.PausedBy
	if at := d.Control.PausedAt.UTC(); d.Control.Paused && !at.IsZero() {
		slot.PausedAt = &at
	}
	slot.Pin = d.Control.Pin
	if until := d.Control.StepDownUntil; until.After(d.Now) {
		slot.StepDownUntil, slot.StepDownNode = &until, d.Control.StepDownNode
	}

	if at, ok := d.Position().Time(); ok && at.T > 0 {
		position := time.Unix(int64(at.T), 0).UTC()
		slot.PositionAt = &position
	}
	if d.Gap != nil {
		slot.Gap = d.Gap.Reason
	}
}

func toSeconds(ms int64) float64 { return float64(ms) / 1000 }

// newIncident returns the stored record with times instead of timestamps.
func newIncident(stored lease.Incident) Incident {
	incident := Incident{ID: stored.ID.Hex(), At: stored.At.UTC(), Discarded: (*Discarded)(stored.Discarded)}
	if lost := stored.Lost; lost != nil {
		incident.Lost = &LostHistory{To: time.Unix(int64(lost.To.T), 0).UTC(), Reason: lost.Reason, Swept: lost.Swept, Repeats: lost.Repeats}
		if !lost.From.IsZero() {
			begin := time.Unix(int64(lost.From.T), 0).UTC()
			incident.Lost.From = &begin
		}
	}
	return incident
}
