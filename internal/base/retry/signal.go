package retry

// Signal puts a token into signal, a channel with room for one, unless a token is pending already. It does not
// block.
func Signal(signal chan<- struct{}) {
	select {
	case signal <- struct{}{}:
	default:
	}
}
