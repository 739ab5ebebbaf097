package process

import (
	"time"

	"github.com/outrelay/outrelay/internal/term"
)

// Hasten makes the relay's calls time out after call, and shortens its intervals of several seconds
// to half a second. It must be called before Run.
func (r *Relay) Hasten(call time.Duration) {
	const soon = 500 * time.Millisecond
	r.shared.Pace = term.Pace{Call: call, Clean: soon, Indexes: soon, Standstill: soon}
}
