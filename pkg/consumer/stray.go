package consumer

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/outrelay/outrelay/internal/service/setaside"
	"github.com/outrelay/outrelay/internal/service/transport"
	"github.com/outrelay/outrelay/pkg/telemetry"
)

// The reasons in StrayStatus.
const (
	// StrayUnread means that no member of the group reads the topic or the partitions. One member retries the messages.
	StrayUnread = "unread"
	// StrayNoHandler means that this process has no handler of that name. If another member has it, the member retries the messages of
	// its own partitions. Otherwise they wait until a handler is registered under the name, or until Consumer.Retire removes them.
	StrayNoHandler = "no_handler"
)

// StrayStatus describes messages of the group that are set aside and do not belong to a partition and a handler of some member.
type StrayStatus struct {
	Handler    string        `json:"handler"`
	Topic      string        `json:"topic"`
	Partitions []int32       `json:"partitions,omitempty"` // with StrayUnread
	Waiting    int           `json:"waiting"`
	Oldest     time.Duration `json:"-"`      // since the first failure of the oldest of them; 0 if none has failed; oldest_s in JSON
	Reason     string        `json:"reason"` // StrayUnread or StrayNoHandler
	// OtherMember is set with StrayNoHandler if another running member of the group has the handler.
	OtherMember bool `json:"other_member,omitempty"`
}

// MarshalJSON writes durations in seconds.
func (s StrayStatus) MarshalJSON() ([]byte, error) {
	type fields StrayStatus
	return json.Marshal(struct {
		fields
		OldestS float64 `json:"oldest_s"`
	}{fields(s), s.Oldest.Seconds()})
}

// String returns a sentence about the messages.
func (s *StrayStatus) String() string {
	text := fmt.Sprintf("%d messages of handler %q are set aside for topic %s", s.Waiting, s.Handler, s.Topic)
	switch {
	case s.OtherMember:
		return text + ", and another member of the group has the handler, but not this process: the messages of partitions that belong to " +
			"a member without the handler wait. All members of a group need the same handlers"
	case s.Reason == StrayNoHandler:
		return text + ", and this process has no handler of that name: register one, or remove them with Retire"
	}
	return fmt.Sprintf("%s, whose partitions %v no member of the group reads: one member retries them", text, s.Partitions)
}

// strayError reports stray messages, once while they are there.
type strayError struct{ StrayStatus }

func (e *strayError) Error() string { return e.String() }

// Is reports ErrNoHandler for messages without a handler.
func (e *strayError) Is(target error) bool {
	return target == ErrNoHandler && e.Reason == StrayNoHandler
}

func (e *strayError) line() line {
	message := "no handler has the name of messages that are set aside; they wait"
	switch {
	case e.OtherMember:
		message = "only other members have the handler of messages that are set aside; all members need the same handlers"
	case e.Reason == StrayUnread:
		message = "no member reads the partitions of messages that are set aside; one member retries them"
	}
	return line{slog.LevelWarn, message, []any{"handler", e.Handler, "topic", e.Topic, "waiting", e.Waiting}}
}

// census is the state of the counts of one run. Only refreshHealth uses it.
type census struct {
	suspects map[setaside.Place]bool // without a member at the last count
	unread   []setaside.Place        // without a member at the last two counts
	failed   bool                    // the last description of the group
	known    map[strayKey]bool       // stray messages that were reported
	recorded bool                    // the last census has succeeded, so this member may have a record
}

type strayKey struct{ handler, topic, reason string }

// takeCensus reads how many messages of the group are set aside. It measures and reports them, and lets the keeper of the group
// retry those that no member reads.
func (r *run) takeCensus(ctx context.Context) error {
	member := setaside.Member{Group: r.c.group, ID: r.memberID, Handlers: r.c.reg.snapshot().names(), Stops: r.c.listStops()}
	census, err := r.c.waiting.Census(ctx, member, r.findUnread)
	// An interrupted census may have stored the record.
	r.census.recorded = err == nil || r.census.recorded && ctx.Err() != nil
	if err != nil {
		return err
	}

	waiting := map[string]waitingCount{}
	var strays []StrayStatus
	for _, n := range census.Counts {
		name := strings.TrimPrefix(n.Handler, r.c.group+"/")
		var age time.Duration
		if !n.Since.IsZero() {
			age = max(census.Now.Sub(n.Since), time.Millisecond)
		}
		count := waiting[name]
		waiting[name] = waitingCount{count.n + int(n.N), max(count.oldest, age)}

		reg := r.c.reg.find(name)
		stray := StrayStatus{Handler: name, Topic: n.Topic, Partitions: n.Partitions, Waiting: int(n.N), Oldest: age}
		// A handler that was registered while the consumer runs may have messages before it gets one.
		if session := r.c.currentSession.Load(); session != nil && reg != nil {
			session.openRoom(reg)
		}
		switch {
		case reg == nil:
			stray.Reason = StrayNoHandler
			stray.OtherMember = slices.Contains(census.Handlers, name)
		case n.Unread:
			stray.Reason = StrayUnread
		default:
			continue
		}
		strays = append(strays, stray)
	}

	r.c.health.setCensus(census.At, waiting, strays)
	r.measureWaiting(waiting)
	r.reportStrays(strays)
	if session := r.c.currentSession.Load(); session != nil {
		var own []transport.TopicPartition
		if census.Keeper {
			own = listUnread(census.Counts)
		}
		session.readStrays(own)
	}
	return nil
}

// listUnread returns the partitions that no member reads.
func listUnread(counts []setaside.Count) (list []transport.TopicPartition) {
	for _, n := range counts {
		for _, id := range n.Partitions {
			if tp := (transport.TopicPartition{Topic: n.Topic, Partition: id}); n.Unread && !slices.Contains(list, tp) {
				list = append(list, tp)
			}
		}
	}
	return list
}

// findUnread returns the places whose partition no member of the group had at this count and at the last one. Between two
// generations of the group, a partition may have no member for a moment.
func (r *run) findUnread(ctx context.Context, places []setaside.Place) ([]setaside.Place, error) {
	isOwn := func(place setaside.Place) bool {
		session := r.c.currentSession.Load()
		return session != nil && session.hasPartition(transport.TopicPartition{Topic: place.Topic, Partition: place.Partition})
	}
	foreign := slices.DeleteFunc(slices.Clone(places), isOwn)
	if len(foreign) == 0 {
		r.census.suspects, r.census.unread = nil, nil
		return nil, nil
	}

	// During a rebalance, and while Kafka does not respond, the last result stays.
	state, err := r.c.transport.DescribeGroup(ctx, r.c.group)
	if err != nil {
		if !r.census.failed && ctx.Err() == nil {
			r.reportTrouble("cannot describe the group; messages that no member reads are not looked for", fmt.Errorf("looking for messages that no member reads: %w", err))
		}
		r.census.failed = true
		return r.census.unread, nil
	}
	r.census.failed = false
	if !state.Stable {
		return r.census.unread, nil
	}

	last := r.census.suspects
	r.census.suspects, r.census.unread = map[setaside.Place]bool{}, nil
	for _, p := range foreign {
		if state.Assigned[transport.TopicPartition{Topic: p.Topic, Partition: p.Partition}] {
			continue
		}
		r.census.suspects[p] = true
		if last[p] {
			r.census.unread = append(r.census.unread, p)
		}
	}
	return r.census.unread, nil
}

// measureWaiting measures the messages of each handler that are set aside.
func (r *run) measureWaiting(waiting map[string]waitingCount) {
	for _, reg := range r.c.reg.snapshot().all {
		count := waiting[reg.name]
		r.c.measure(telemetry.Measurement{Metric: telemetry.Waiting, N: int64(count.n), Handler: reg.name})
		r.c.measure(telemetry.Measurement{Metric: telemetry.OldestWaiting, Took: count.oldest, Handler: reg.name})
	}
}

// reportStrays measures stray messages, and reports those that are new.
func (r *run) reportStrays(strays []StrayStatus) {
	known := map[strayKey]bool{}
	for i := range strays {
		status := &strays[i]
		key := strayKey{status.Handler, status.Topic, status.Reason}
		known[key] = true
		r.c.measure(telemetry.Measurement{Metric: telemetry.Stray, N: int64(status.Waiting), Handler: status.Handler, Topic: status.Topic, Reason: status.Reason})
		if !r.census.known[key] {
			r.report(&strayError{*status})
		}
	}

	for key := range r.census.known {
		if !known[key] {
			r.c.measure(telemetry.Measurement{Metric: telemetry.Stray, Handler: key.handler, Topic: key.topic, Reason: key.reason})
		}
	}
	r.census.known = known
}

// newStray returns the place of a partition that no member reads, for the retries of its messages. It fetches nothing.
func newStray(session *session, tp transport.TopicPartition) *partition {
	partition := newPartition(session, tp)
	partition.isStray = true
	close(partition.fetchEnded)
	return partition
}

// readStrays makes this member retry the messages of exactly these partitions, which no member reads.
func (s *session) readStrays(list []transport.TopicPartition) {
	var added []*partition
	s.partitionsMu.Lock()
	for tp := range s.strays {
		if !slices.Contains(list, tp) {
			s.dropStrayLocked(tp)
		}
	}
	for _, tp := range list {
		if s.strays[tp] == nil && s.partitions[tp] == nil {
			partition := newStray(s, tp)
			s.strays[tp] = partition
			added = append(added, partition)
		}
	}
	s.partitionsMu.Unlock()

	s.loadQueues(added)
}

// dropStrayLocked ends the retries of a partition that a member reads now, or that has no messages any more.
func (s *session) dropStrayLocked(tp transport.TopicPartition) {
	partition := s.strays[tp]
	if partition == nil {
		return
	}
	delete(s.strays, tp)
	// Its last attempts end with the session.
	s.pastStrays = append(s.pastStrays, partition)
	partition.endServe()
	partition.stopStarting()
}

// listStrays returns the partitions that no member reads, and that this member retries.
func (s *session) listStrays() (list []*partition) {
	s.partitionsMu.Lock()
	defer s.partitionsMu.Unlock()
	for _, p := range s.strays {
		list = append(list, p)
	}
	return list
}

// hasPartition reports whether the group has given the partition to this member.
func (s *session) hasPartition(tp transport.TopicPartition) bool {
	s.partitionsMu.Lock()
	defer s.partitionsMu.Unlock()
	return s.partitions[tp] != nil
}
