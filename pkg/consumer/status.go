package consumer

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/outrelay/outrelay/internal/contract/record"
)

// Status describes a consumer. It marshals to JSON, with durations in nanoseconds, and contains no payloads and no keys.
type Status struct {
	// Ready is true while the consumer is a member of its group and MongoDB and Kafka respond, also if it has no partitions. It
	// becomes false after 30 s of trouble, so that a short outage takes no instance out of service.
	Ready bool `json:"ready"`
	// Reasons are sentences about everything that is wrong: the trouble that makes Ready false, from its beginning, and in
	// addition stuck partitions and suspended handlers, which never do.
	Reasons    []string          `json:"reasons,omitempty"`
	Group      string            `json:"group"`
	Paused     bool              `json:"paused"`
	Partitions []PartitionStatus `json:"partitions,omitempty"`
	Handlers   []HandlerStatus   `json:"handlers,omitempty"`
	// Strays are messages of the group that are set aside for a topic, a partition or a handler that is gone. They are reasons,
	// and never make Ready false.
	Strays []StrayStatus `json:"strays,omitempty"`
	// Unknown counts messages since the start whose name no handler takes, by name: dead letters, and with WithSkip messages that
	// passed. It has at most 100 names.
	Unknown map[string]int64 `json:"unknown,omitempty"`
}

// PartitionStatus describes a partition that this member has.
type PartitionStatus struct {
	Topic     string        `json:"topic"`
	Partition int32         `json:"partition"`
	Lag       int64         `json:"lag"`   // offsets that are not finished; refreshed every 3 s while nothing is fetched
	Oldest    time.Duration `json:"-"`     // age of the oldest message that was read and is not finished; 0 if there is none; oldest_s in JSON
	Stuck     bool          `json:"stuck"` // nothing that is due was finished for longer than the timeout of the slowest handler
}

// HandlerStatus describes a handler.
type HandlerStatus struct {
	Name           string        `json:"name"`
	Running        int           `json:"running"`                  // attempts of this member
	Waiting        int           `json:"waiting"`                  // messages set aside, in the whole group; refreshed every 5 s
	OldestWaiting  time.Duration `json:"-"`                        // since the first failure of the oldest of them; oldest_waiting_s in JSON
	Suspended      bool          `json:"suspended"`                // the handler takes no messages
	SuspendedUntil time.Time     `json:"suspended_until,omitzero"` // zero: not suspended, or until ResumeHandler
	RateWaiting    int           `json:"rate_waiting"`             // lanes of this member that wait for WithRate
	LastError      string        `json:"last_error,omitempty"`     // at most 512 bytes; empty after a success
}

// MarshalJSON writes durations in seconds.
func (s PartitionStatus) MarshalJSON() ([]byte, error) {
	type fields PartitionStatus
	return json.Marshal(struct {
		fields
		OldestS float64 `json:"oldest_s"`
	}{fields(s), s.Oldest.Seconds()})
}

// MarshalJSON writes durations in seconds.
func (s HandlerStatus) MarshalJSON() ([]byte, error) {
	type fields HandlerStatus
	return json.Marshal(struct {
		fields
		OldestWaitingS float64 `json:"oldest_waiting_s"`
	}{fields(s), s.OldestWaiting.Seconds()})
}

// Status describes the consumer now. It does no I/O: the values of servers are refreshed in the background while Run runs.
func (c *Consumer) Status() Status {
	status := Status{Group: c.group, Paused: c.gate.isPaused(), Partitions: c.partitionStatus(), Handlers: c.handlerStatus()}
	status.Ready, status.Reasons = c.health.isReady()
	c.health.mu.Lock()
	status.Unknown, status.Strays = maps.Clone(c.health.unknown), slices.Clone(c.health.strays)
	c.health.mu.Unlock()

	for _, p := range status.Partitions {
		if p.Stuck {
			status.Reasons = append(status.Reasons, fmt.Sprintf("partition %s/%d is stuck: its oldest message is %v old", p.Topic, p.Partition, p.Oldest.Round(time.Second)))
		}
	}
	for _, h := range status.Handlers {
		if h.Suspended {
			status.Reasons = append(status.Reasons, fmt.Sprintf("handler %q is suspended", h.Name))
		}
	}
	for _, r := range c.reg.snapshot().all {
		if err := r.unprepared.Load(); err != nil {
			status.Reasons = append(status.Reasons, errorText(err))
		}
	}
	for i := range status.Strays {
		status.Reasons = append(status.Reasons, status.Strays[i].String())
	}
	return status
}

// partitionStatus describes the partitions of the current session, by topic and number. It leaves out those whose start is not
// known yet.
func (c *Consumer) partitionStatus() []PartitionStatus {
	session := c.currentSession.Load()
	if session == nil {
		return nil
	}

	// A partition is stuck if it makes no progress for longer than any handler may run. A handler may have no timeout.
	slowest := time.Duration(0)
	for _, r := range c.reg.snapshot().all {
		if r.timeout < 0 {
			slowest = math.MaxInt64
		}
		slowest = max(slowest, r.timeout)
	}

	var list []PartitionStatus
	for _, p := range session.listPartitions() {
		p.mu.Lock()
		if p.located {
			list = append(list, PartitionStatus{
				Topic: p.tp.Topic, Partition: p.tp.Partition, Lag: p.lagLocked(), Oldest: p.oldestLocked(),
				Stuck: p.isStuckLocked(slowest),
			})
		}
		p.mu.Unlock()
	}
	slices.SortFunc(list, func(a, b PartitionStatus) int {
		return cmp.Or(strings.Compare(a.Topic, b.Topic), cmp.Compare(a.Partition, b.Partition))
	})
	return list
}

// isStuckLocked reports whether the partition has made no progress for longer than most.
func (p *partition) isStuckLocked(most time.Duration) bool {
	if len(p.entries) == 0 {
		return false
	}

	since := p.progressAt
	// In a retry topic, each message waits for its time.
	if first := p.entries[0].m; first != nil {
		if due, ok := parseTimeHeader(first, record.HeaderRetryDue); ok && due.After(since) {
			since = due
		}
	}
	return time.Since(since) > most
}

// handlerStatus describes the handlers in the order of their registration.
func (c *Consumer) handlerStatus() []HandlerStatus {
	var list []HandlerStatus
	for _, r := range c.reg.snapshot().all {
		status := HandlerStatus{Name: r.name, Running: int(r.running.Load())}
		if r.rateLimiter != nil {
			status.RateWaiting = r.rateLimiter.countWaiting()
		}
		if text := r.lastError.Load(); text != nil {
			status.LastError = *text
		}
		status.Suspended, status.SuspendedUntil = r.suspension.status()

		c.health.mu.Lock()
		count := c.health.waiting[r.name]
		c.health.mu.Unlock()
		status.Waiting, status.OldestWaiting = count.n, count.oldest
		list = append(list, status)
	}
	return list
}
