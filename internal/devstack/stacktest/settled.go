package stacktest

import "time"

// settleFor is how long goroutines that are about to end have for it.
const settleFor = 30 * time.Second

// Settled is m for goleak.VerifyTestMain, with goleak.Find as find: it runs the tests, and then waits for the goroutines that
// are about to end. goleak by itself gives them less than half a second, within which on a loaded machine not every connection
// that was closed has had its turn. What stays is told as ever.
func Settled[O any](m runner, find func(...O) error) runner {
	return settled(func() int {
		code := m.Run()
		for end := time.Now().Add(settleFor); code == 0 && find() != nil && time.Now().Before(end); {
			continue // find waits by itself
		}
		return code
	})
}

// runner is a testing.M.
type runner interface{ Run() int }

type settled func() int

func (s settled) Run() int { return s() }
