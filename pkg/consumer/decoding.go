package consumer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/service/transport"
	"github.com/outrelay/outrelay/pkg/codec"
	"github.com/outrelay/outrelay/pkg/consumer/deadletter"
)

// WithDecoder replaces Decode, for records that no relay wrote. decode gets a message with the place, the time, the key, the value
// and the headers of the record. It may set the other fields, for example the name, and replace the value. The consumer sets
// Group, and fills in ID and Attempt if they are empty. ctx ends after WithTimeout of New, and when the partition is given back.
//
// While decode decodes a record, and between two attempts, the partition reads nothing further: the handlers of the record are
// unknown, and later messages must not overtake it. What follows an error of decode:
//
//   - codec.ErrUnavailable: an outage. The record is decoded again until that succeeds.
//   - ErrMalformed, as from Decode: the record becomes a dead letter at once.
//   - RetryIn, Suspend, Reject and Discard: as from a handler. Suspend is the same as RetryIn.
//   - Any other error, a panic and a timeout: the Retry of New decides. The record is decoded again after the waits of Retry.Quick,
//     and, if Retry.MaxAttempts is above the number of these attempts, then after Retry.Min up to Retry.Max. Then it is given up. A
//     record that cannot be decoded is not set aside.
//
// The offset passes after the dead letter is written.
func WithDecoder(decode func(ctx context.Context, message *Message) error) Option {
	return option(func(settings *settings) {
		if decode != nil {
			settings.decoder = decode
		}
	})
}

// decodeRecord decodes a record. It returns a panic or an end of the decoder as an error.
func (s *session) decodeRecord(ctx context.Context, record *transport.Record) (*Message, error) {
	if record.Err != nil {
		return nil, fmt.Errorf("%w: %w", ErrMalformed, record.Err)
	}

	message := newMessage(record)
	if err := s.c.callDecoder(ctx, message); err != nil {
		return nil, err
	}
	message = completeMessage(message, record, s.c.group)
	s.c.dropForeignControls(message, time.Now())
	if err := checkIdentity(message); err != nil {
		return nil, err
	}
	return message, nil
}

// callDecoder calls the decoder. Decode itself needs no guard.
func (c *Consumer) callDecoder(ctx context.Context, message *Message) error {
	if c.s.decoder == nil {
		return Decode(ctx, message)
	}
	return callLimited(ctx, c.s.timeout, "the decoder", func(ctx context.Context) error {
		return runGuarded(func() error { return c.s.decoder(ctx, message) })
	})
}

// decoded is the result of decodeUntilDecided.
type decoded struct {
	message *Message // with err, it has the fields of the record alone
	err     error
	verdict *verdict // on a record that is given up
	earlier failures // the failures before err
}

// decodeUntilDecided decodes a record until that succeeds, or until the record is given up. It returns nil if the partition is
// paused or given back before.
func (p *partition) decodeUntilDecided(record *transport.Record) *decoded {
	var fails failures
	var unavailable *retry.Backoff
	defer func() {
		if unavailable != nil {
			p.noteDecoder(nil)
		}
	}()

	for {
		message, err := p.s.decodeRecord(p.serveCtx, record)
		if err == nil {
			return &decoded{message: message}
		}
		if p.serveCtx.Err() != nil {
			return nil
		}
		// Nothing is known about the record, so the message has the fields of the record itself.
		message = completeMessage(newMessage(record), record, p.s.c.group)
		p.s.c.dropForeignControls(message, time.Now())

		if errors.Is(err, codec.ErrUnavailable) {
			if unavailable == nil {
				unavailable = retry.Reopen.Start()
			}
			p.noteDecoder(wrapDecodeError(record, err))
			if !p.waitUnpaused(unavailable.Next()) {
				return nil
			}
			continue
		}

		earlier := fails
		fails = fails.note(err, message, time.Now())
		verdict, again := p.s.c.decideDecoding(err, message, fails)
		if !again {
			return &decoded{message, wrapDecodeError(record, err), &verdict, earlier}
		}
		if verdict.Uncounted {
			fails.Spared++
		}
		p.s.report(&HandlerError{Message: message, Attempt: fails.Total, Next: verdict.Action.String(), Err: err})
		if !p.waitUnpaused(verdict.Delay) {
			return nil
		}
	}
}

// decideDecoding returns the verdict on a record that cannot be decoded, and whether to decode it again after its delay.
func (c *Consumer) decideDecoding(err error, message *Message, failures failures) (decided verdict, again bool) {
	decider := decider{retry: c.s.retry.withDefaults(), rules: c.s.retryRules}
	decided = decider.decide(err, message, failures)
	switch decided.Action {
	case actRetry, actWait:
		return decided, true
	case actDiscard:
		return decided, false
	case actAside, actSuspend:
		// The Retry that a rule of the user selects has its own limit.
		retry, _ := decider.retryFor(err)
		if decided.Delay != untilResumed && (decided.Uncounted || retry.MaxAttempts > 0) {
			return decided, true
		}
	default:
	}

	class := cmp.Or(decided.Reason, classOf(err))
	if class == deadletter.ClassHandler {
		class = deadletter.ClassMalformed
	}
	return verdict{Action: actDeadLetter, Reason: class, Attempts: failures}, false
}

// noteDecoder records that a decoder is unavailable, or with nil that it is not. It reports the beginning and the end.
func (p *partition) noteDecoder(err error) {
	kind := healthDecoder + " for partition " + p.tp.String()
	if changed := p.s.c.health.note(kind, err); !changed {
		return
	}
	if err == nil {
		p.s.reportLine(line{slog.LevelInfo, "records can be decoded again", []any{"topic", p.tp.Topic, "partition", p.tp.Partition}},
			fmt.Errorf("partition %s goes on: its records can be decoded again", p.tp))
		return
	}
	p.reportTrouble("cannot use the decoder; the partition reads nothing further",
		fmt.Errorf("waiting for the decoder, partition %s reads nothing further: %w", p.tp, err))
}

// waitUnpaused blocks for duration. It returns false if the partition is paused or given back.
func (p *partition) waitUnpaused(duration time.Duration) bool {
	timer := time.NewTimer(duration)
	defer timer.Stop()

	for {
		paused, changed := p.s.c.gate.currentState()
		if paused || p.serveCtx.Err() != nil {
			return false
		}
		select {
		case <-timer.C:
			return true
		case <-changed:
		case <-p.serveCtx.Done():
		}
	}
}
