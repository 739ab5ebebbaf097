package stacktest

import "time"

// settleFor is how long goroutines have to end. The end of a transaction is repeated for a minute if its server is gone.
const settleFor = 75 * time.Second

// Settled wraps runner for goleak.VerifyTestMain, with goleak.Find as find. It runs the tests, and then waits for
// goroutines that are about to end. goleak alone waits less than half a second. On a loaded machine that is
// too short for some closed connections. goleak still reports the goroutines that remain.
func Settled[O any](runner runner, find func(...O) error) runner {
	return settled(func() int {
		code := runner.Run()
		for end := time.Now().Add(settleFor); code == 0 && find() != nil && time.Now().Before(end); {
			// find waits a little.
			continue
		}
		return code
	})
}

// runner is a testing.M.
type runner interface{ Run() int }

type settled func() int

func (s settled) Run() int { return s() }
