package deadletter

import (
	"testing"
	"time"
)

func TestPartsFitTheServer(t *testing.T) {
	t.Parallel()
	p := newPace()
	for range 10 {
		p.took(10*time.Millisecond, p.n)
	}
	if p.n != MaxLetters {
		t.Errorf("parts of %d on a quick server", p.n)
	}
	p.took(200*time.Millisecond, p.n)
	if p.n != MaxLetters {
		t.Errorf("parts of %d, with nothing to change", p.n)
	}
	p.took(time.Second, 300) // a part that its bytes had cut
	if p.n != 150 {
		t.Errorf("parts of %d after a slow one of 300", p.n)
	}
	p.took(time.Millisecond, 10) // tells nothing of 150
	if p.n != 150 {
		t.Errorf("parts of %d after a small one", p.n)
	}
	for range 10 {
		p.took(time.Second, p.n)
	}
	if p.n != smallest {
		t.Errorf("parts of %d on a slow server", p.n)
	}
	p.never(20)
	p.took(time.Second, 5)
	if p.n != 5 {
		t.Errorf("parts of %d although those of 20 never ended", p.n)
	}
}

func TestAPartHasAtMostItsLettersAndBytes(t *testing.T) {
	t.Parallel()
	small, large := prepared{}, prepared{dead: Dead{Envelope: make([]byte, MaxBytes/2)}}
	var many []prepared
	for range 2 * MaxLetters {
		many = append(many, small)
	}
	for _, c := range []struct {
		rest        []prepared
		limit, want int
	}{
		{many, MaxLetters, MaxLetters}, {many, 25, 25}, {many[:3], 25, 3}, {[]prepared{large, large, large}, 25, 1}, {[]prepared{large, small, small, large}, 25, 3}, {nil, 25, 0},
	} {
		if got := take(c.rest, c.limit); got != c.want {
			t.Errorf("%d of %d with limit %d, want %d", got, len(c.rest), c.limit, c.want)
		}
	}
}
