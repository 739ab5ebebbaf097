package consumer

import (
	"cmp"
	"fmt"
	"strings"
	"sync"
	"time"
)

// unknownInterval is how often a type without a handler is reported while its messages become dead letters. A type without a handler is
// one mistake, or none, so its letters have no line each.
const unknownInterval = time.Minute

// otherTypes stands for the types above maxCachedTypes, because producers choose the types.
const otherTypes = "\x00"

// unknownTypes counts the letters of types without a handler. It is safe for concurrent use.
type unknownTypes struct {
	mu    sync.Mutex
	types map[string]*unknownType
}

// unknownType is a type without a handler.
type unknownType struct {
	reported time.Time
	letters  int // since then
}

// countLetter counts a letter of a type. It reports whether a line is due, and the number of letters that the line stands for.
func (u *unknownTypes) countLetter(typ string, now time.Time) (letters int, due bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.types == nil {
		u.types = map[string]*unknownType{}
	}

	if u.types[typ] == nil && len(u.types) >= maxCachedTypes {
		typ = otherTypes
	}
	counted := u.types[typ]
	if counted == nil {
		counted = &unknownType{}
		u.types[strings.Clone(typ)] = counted
	}

	counted.letters++
	if now.Sub(counted.reported) < unknownInterval {
		return 0, false
	}
	letters = counted.letters
	counted.reported, counted.letters = now, 0
	return letters, true
}

// reportUnknown reports that message becomes a dead letter because no handler takes its type: the first message of a type at once, later
// ones at most once in unknownInterval.
func (r *run) reportUnknown(message *Message, attempt int) {
	letters, due := r.c.unknownTypes.countLetter(message.Name, time.Now())
	if !due {
		return
	}

	failed := &HandlerError{Message: message, Attempt: attempt, Next: actDeadLetter.String(), Err: fmt.Errorf(
		"%w takes type %q: register one and requeue the dead letters of class unknown to it, or skip the type with WithSkip(%q)",
		ErrNoHandler, message.Name, cmp.Or(message.Name, "*"))}
	line := failed.line()
	line.attrs = append(line.attrs, "letters", letters)
	r.reportLine(line, failed)
}
