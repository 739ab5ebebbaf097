package retry

// Signal puts a token into c, a channel with room for one, unless a token is pending already. It does not
// block.
func Signal(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
