package consumer

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/outrelay/outrelay/internal/service/setaside"
	"github.com/outrelay/outrelay/internal/service/transport"
	"github.com/outrelay/outrelay/pkg/consumer/deadletter"
	"github.com/outrelay/outrelay/pkg/telemetry"
)

// requestPoll is how often a member looks for requests of operators.
const requestPoll = 2 * time.Second

// carryOutRequests carries out the requests of operators for the messages that are set aside in the partitions of this member, until
// the session ends: requeued dead letters, attempts now, and discards.
func (s *session) carryOutRequests() {
	tick := time.NewTicker(requestPoll)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-s.serveCtx.Done():
			return
		}

		requests, err := s.c.waiting.Requested(s.serveCtx, s.c.group)
		if err != nil && s.serveCtx.Err() == nil {
			s.reportTrouble("cannot read the requests of operators; they are read again", err)
		}
		for i := range requests {
			if s.serveCtx.Err() == nil {
				s.carryOutRequest(&requests[i])
			}
		}
	}
}

// carryOutRequest gives up the messages of a queue that are discarded, and lets its first message be tried at once. It leaves out the
// partitions of other members. A discard needs no handler in this process.
func (s *session) carryOutRequest(request *setaside.Request) {
	partition := s.findPartition(transport.TopicPartition{Topic: request.Topic, Partition: request.Partition})
	if partition == nil {
		return
	}

	if request.Discards > 0 {
		done := make(chan struct{})
		// A drain waits for the message in progress, within its limit.
		started := partition.goWorker(func() {
			defer close(done)
			partition.giveUpQueue(request)
		})
		if !started {
			return
		}
		select {
		case <-done:
		case <-partition.serveCtx.Done():
			return
		}
	}

	if reg := s.c.findByConsumer(request.Handler); reg != nil {
		reg.suspension.allowProbe()
		s.openRoom(reg).hasten(queueKey{partition.tp, request.Digest})
	}
}

// giveUpQueue gives up the messages of a queue that are discarded. After requestPoll it leaves the rest to the next look for requests,
// so that no queue holds up the others.
func (p *partition) giveUpQueue(request *setaside.Request) {
	for began := time.Now(); time.Since(began) < requestPoll; {
		messages, err := p.s.c.waiting.Discarded(p.serveCtx, request.Queue)
		if err != nil && p.serveCtx.Err() == nil {
			p.reportTrouble("cannot read the messages that an operator discarded; they are read again", err, "handler", request.Handler)
		}
		if len(messages) == 0 {
			return
		}

		for i := range messages {
			if p.serveCtx.Err() != nil || !p.giveUpDiscarded(&messages[i]) {
				return
			}
		}
	}
}

// findByConsumer returns the handler with that name in the inbox, or nil if this process has none.
func (c *Consumer) findByConsumer(name string) *registration {
	all := c.reg.snapshot().all
	hasName := func(registration *registration) bool { return c.inboxConsumer(registration) == name }
	if i := slices.IndexFunc(all, hasName); i >= 0 {
		return all[i]
	}
	return nil
}

// hasten makes a queue due at once. It adds the queue if it is unknown, as that of a dead letter that was requeued.
func (r *waitingRoom) hasten(key queueKey) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.scheduleLocked(r.findQueueLocked(key), time.Now())
}

// discardedError is the reason of the dead letter of a message that an operator has discarded.
type discardedError struct{ by, last string }

func (e *discardedError) Error() string {
	text := e.by + " has discarded the message while it waited for a retry"
	if e.last != "" {
		text += "; the last failure: " + e.last
	}
	return text
}

// giveUpDiscarded makes a message that an operator has discarded a dead letter. It returns false if that failed, and has reported the
// error: the request stays.
func (p *partition) giveUpDiscarded(message *setaside.Message) bool {
	session := p.s
	rec := recordOfWaiting(message)
	// A message that cannot be decoded is given up like others.
	decoded, _ := p.decodeWaiting(&rec)
	decoded.Key, decoded.Value = rec.Key, rec.Value

	attempts := attemptsFromStore(message.Attempts, time.Now())
	attempts.Total = max(decoded.Attempt, 1) - 1 + attempts.Failed
	verdict := verdict{Action: actDeadLetter, Reason: deadletter.ClassSkipped, Attempts: attempts}
	cause := &discardedError{by: message.Discarded.By}
	if n := len(attempts.History); n > 0 {
		cause.last = attempts.History[n-1].Reason
	}
	handler := strings.TrimPrefix(message.Handler, session.c.group+"/")

	// The removal decides between the discard and an attempt of another member.
	removed := false
	var givenUp *GivenUp
	err := session.transact(p.drainCtx, func(ctx context.Context) (err error) {
		if removed, err = session.c.waiting.Remove(ctx, message); err != nil || !removed {
			return err
		}
		givenUp, err = session.callDisposer(ctx, decoded, handler, verdict, cause)
		return err
	})
	if err != nil {
		session.reportTrouble("cannot give up a discarded message; that is tried again", fmt.Errorf("discarding message %s: %w", originOf(decoded), err), "handler", handler)
		return false
	}
	if !removed {
		return true
	}

	session.announce(givenUp)
	session.c.measure(telemetry.Measurement{Metric: telemetry.DeadLetters, N: 1, Handler: handler, Reason: deadletter.ClassSkipped})
	session.report(&HandlerError{Handler: handler, Message: decoded, Attempt: attempts.Total, Next: actDeadLetter.String(), Err: cause})
	return true
}
