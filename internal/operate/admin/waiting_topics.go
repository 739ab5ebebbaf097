package admin

import (
	"context"
	"fmt"
	"time"

	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

// WaitingTopic counts the envelopes that wait for one topic. An envelope that waits for several
// topics counts for each.
type WaitingTopic struct {
	Topic       string     `json:"topic"` // "" if the envelopes do not name it
	Retry       int64      `json:"retry"`
	Blocked     int64      `json:"blocked"`
	Parked      int64      `json:"parked"`
	Queued      int64      `json:"queued"`
	Keys        int64      `json:"keys"`             // ordering keys with any of these; 0 if more than 50,000 envelopes wait
	Oldest      *time.Time `json:"oldest,omitempty"` // when the oldest envelope was committed, to the second
	OldestAgeS  float64    `json:"oldest_age_s"`
	Collections []string   `json:"collections"` // at most 20
	// Target is the owner's report about the topic, if it cannot be written now.
	Target *UnwritableTopic `json:"target,omitempty"`
}

// Topics returns the waiting envelopes by topic. The topic with the oldest envelope comes first.
// The counts are figures like those of [Operator.Overview].
func (w Waiting) Topics(ctx context.Context) ([]WaitingTopic, error) {
	status, err := ReadStatus(ctx, w.op.State)
	if err != nil {
		return nil, err
	}
	counted, _, err := w.op.readFigures(ctx)
	if err != nil {
		return nil, err
	}
	return addTargets(newWaitingTopics(counted.Topics, time.Now()), status, w.op.Watcher), nil
}

// newWaitingTopics returns the counted topics with the ages of their oldest envelopes.
func newWaitingTopics(list []waiting.Topic, now time.Time) []WaitingTopic {
	topics := []WaitingTopic{}
	for _, counted := range list {
		topic := WaitingTopic{
			Topic: counted.Topic, Retry: counted.Retry, Blocked: counted.Blocked, Parked: counted.Parked, Queued: counted.Queued, Keys: counted.Keys,
			Collections: counted.Outboxes,
		}
		if !counted.Oldest.IsZero() {
			oldest := counted.Oldest.UTC()
			topic.Oldest = &oldest
			topic.OldestAgeS = max(now.Sub(oldest).Seconds(), 0)
		}
		topics = append(topics, topic)
	}
	return topics
}

// addTargets returns the list with the owners' reports about topics that cannot be written.
// It adds topics for which no waiting envelope is stored yet.
func addTargets(list []WaitingTopic, status Status, watcher string) []WaitingTopic {
	topics := list
	for i := range status.Slots {
		slot := &status.Slots[i]
		if slot.Name != watcher {
			continue
		}
		for _, b := range slot.Unwritable {
			topics = addTarget(topics, b)
		}
	}
	return topics
}

// addTarget adds one report. If several slots report the same topic, it keeps the earliest report.
func addTarget(list []WaitingTopic, topic UnwritableTopic) []WaitingTopic {
	for i := range list {
		if list[i].Topic != topic.Topic {
			continue
		}
		if known := list[i].Target; known == nil || topic.Since.Before(known.Since) {
			list[i].Target = &topic
		}
		return list
	}
	return append(list, WaitingTopic{Topic: topic.Topic, Collections: []string{}, Target: &topic})
}

// InvalidError is returned for a request that is wrong.
type InvalidError struct{ Reason string }

func (e *InvalidError) Error() string { return e.Reason }

func invalidRequest(format string, args ...any) error {
	return &InvalidError{fmt.Sprintf(format, args...)}
}
