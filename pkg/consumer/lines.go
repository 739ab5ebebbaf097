package consumer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/service/transport"
)

// explainAfter is how long a member waits for the group, or for a partition, before the log says why.
const explainAfter = 3 * time.Second

// line is one line of the log: a constant message, and attributes without payloads, keys and headers.
type line struct {
	level   slog.Level
	message string
	attrs   []any
}

// lineError is an error that has a line of its own in the log.
type lineError interface {
	error
	line() line
}

// Fault reports an error from which the transport recovers without help.
func (r *run) Fault(err error) {
	if missing, ok := errors.AsType[*transport.MissingTopicsError](err); ok {
		r.noTopic.Store(missing.All)
		r.reportLine(line{slog.LevelWarn, "waiting for topics: they do not exist yet, or the Kafka login may not read them", []any{"topics", missing.Topics, "every", missing.Every}}, err)
		return
	}
	if unused, ok := errors.AsType[*transport.UnusedTopicsError](err); ok {
		r.reportLine(line{slog.LevelWarn, "no handler uses these retry topics; they are read until they are deleted", []any{"topics", unused.Topics}}, err)
		return
	}
	r.reportTrouble("a request to Kafka failed; it is repeated", err)
}

// report passes an error to WithErrorHook. If there is no WithErrorHook, or if WithErrorHook panics, it writes the line of the error to
// the log.
func (r *run) report(err lineError) { r.reportLine(err.line(), err) }

// reportTrouble is report for an error without a line of its own. The message is "cannot X; what follows".
func (r *run) reportTrouble(message string, err error, attrs ...any) {
	r.reportLine(line{slog.LevelWarn, message, append(attrs, "error", err)}, err)
}

// reportTrouble is that of the run, with the partition.
func (p *partition) reportTrouble(message string, err error, attrs ...any) {
	p.s.reportTrouble(message, err, append(attrs, "topic", p.tp.Topic, "partition", p.tp.Partition)...)
}

func (r *run) reportLine(line line, err error) {
	if hook := r.c.s.onError; hook != nil {
		failed := runGuarded(func() error { hook(r.ctx, err); return nil })
		if failed == nil {
			return
		}
		line.attrs = append(line.attrs, "hook", failed)
	}
	r.write(line)
}

// note writes a line about the normal course of the consumer.
func (r *run) note(message string, attrs ...any) {
	r.write(line{slog.LevelInfo, message, attrs})
}

func (r *run) write(line line) {
	r.c.s.log.Log(r.ctx, line.level, line.message, append([]any{"group", r.c.group}, line.attrs...)...)
}

// overdueAfter is the time after its timeout in which a handler may return before it is reported.
const overdueAfter = time.Second

// reportOverdue reports that a handler still runs after its timeout.
func (r *run) reportOverdue(reg *registration, message *Message) {
	place := fmt.Sprintf("%s/%d@%d", message.Topic, message.Partition, message.Offset)
	r.reportLine(line{slog.LevelWarn, "handler still runs after its timeout; the later messages of its lane wait", []any{
		"handler", reg.name, "topic", message.Topic, "partition", message.Partition, "offset", message.Offset,
		"id", record.Clip(message.ID, maxReason), "type", record.Clip(message.Name, maxReason), "timeout", reg.timeout,
		"fix", "return when the context ends",
	}}, fmt.Errorf("handler %s still runs %v after its call with message %s at %s: it must return when its context ends",
		reg.name, reg.timeout+overdueAfter, record.Clip(message.ID, maxReason), place))
}

// line returns the line of a failed attempt. The line of a dead letter has its own message and level, for alerts.
func (e *HandlerError) line() line {
	message := e.Message
	out := line{slog.LevelWarn, "handler failed; the message is tried again", []any{
		"handler", e.Handler, "topic", message.Topic, "partition", message.Partition, "offset", message.Offset,
		"id", record.Clip(message.ID, maxReason), "type", record.Clip(message.Name, maxReason),
		"class", classOf(e.Err), "attempt", e.Attempt, "next", e.Next, "error", e.Err,
	}}

	switch e.Next {
	case actDeadLetter.String():
		out.level, out.message = slog.LevelError, "message is given up; it is a dead letter now"
	case actDiscard.String():
		out.message = "message is discarded"
	}
	if e.Stack != nil {
		out.attrs = append(out.attrs, "stack", string(e.Stack))
	}
	return out
}

// formatPartitions returns partitions by topic: "orders[0 1 2] refunds[0]".
func formatPartitions(list []transport.TopicPartition) string {
	byTopic := map[string][]int32{}
	var topics []string
	for _, tp := range list {
		if byTopic[tp.Topic] == nil {
			topics = append(topics, tp.Topic)
		}
		byTopic[tp.Topic] = append(byTopic[tp.Topic], tp.Partition)
	}

	slices.Sort(topics)
	for i, topic := range topics {
		slices.Sort(byTopic[topic])
		topics[i] = fmt.Sprint(topic, byTopic[topic])
	}
	return strings.Join(topics, " ")
}

// serving is whether a generation of the group is served now. It is safe for concurrent use.
type serving struct {
	mu      sync.Mutex
	now     bool
	changed chan struct{} // closed and replaced at each change
}

func newServing() *serving { return &serving{changed: make(chan struct{})} }

func (s *serving) set(now bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.now = now
	close(s.changed)
	s.changed = make(chan struct{})
}

// current returns whether a generation is served, and a channel that is closed at the next change.
func (s *serving) current() (now bool, changed <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.now, s.changed
}

// explainWaits writes why the member gets no partitions, whenever no generation begins for long. It blocks until ctx ends.
func (r *run) explainWaits(ctx context.Context) {
	explained, away := false, false
	for {
		serves, changed := r.serving.current()
		var late <-chan time.Time
		if !serves && !explained {
			late = time.After(explainAfter)
		}
		select {
		case <-changed:
			explained = false
			continue
		case <-ctx.Done():
			return
		case <-late:
		}

		// That topics are missing is in the log.
		if r.noTopic.Load() {
			continue
		}
		call, cancel := context.WithTimeout(ctx, healthTimeout)
		state, err := r.c.transport.DescribeGroup(call, r.c.group)
		cancel()
		// That Kafka does not respond is in the log. Right after an outage, the group has had no time to form.
		wasAway := away
		if away = err != nil; away || wasAway || state.Members == 0 {
			continue
		}
		r.explainWait(state.Members)
		explained = true
	}
}

// explainWait writes that the group has members and no generation begins.
func (r *run) explainWait(members int) {
	attrs := []any{"members", members}
	if limited, ok := r.c.transport.(interface{ MemberTimeout() time.Duration }); ok {
		attrs = append(attrs, "at_most", limited.MemberTimeout())
	}
	r.note("waiting for the group: a listed member does not join again; it finishes messages, or has ended without a regular stop", attrs...)
}

// explainIdle writes that the member has no partition, if that lasts. It blocks until the member has one, at most for explainAfter.
func (s *session) explainIdle() {
	if retry.Sleep(s.serveCtx, explainAfter) != nil || len(s.listPartitions()) > 0 {
		return
	}
	ctx, cancel := context.WithTimeout(s.serveCtx, healthTimeout)
	defer cancel()
	state, err := s.c.transport.DescribeGroup(ctx, s.c.group)
	switch {
	case err != nil:
		s.note("no partition is assigned, and Kafka does not describe the group", "error", err)
	case len(state.Assigned) == 0:
		s.write(line{
			slog.LevelWarn, "no partition is assigned to any member of the group; the group forms again when its topics can be read",
			[]any{"members", state.Members},
		})
	default:
		s.note("no partition is assigned; the group has more members than partitions, and this member stands by", "members", state.Members)
	}
}
