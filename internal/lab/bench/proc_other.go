//go:build !linux

package bench

func processUsage(int) (usage, bool)               { return usage{}, false }
func processTicks(int) (float64, bool)             { return 0, false }
func machineTicks() (busy, total float64, ok bool) { return 0, 0, false }
func listeners([]string) []int                     { return nil }
