package target

// StockEngine is the value of EngineSpec.Engine for a kube-apiserver as Kubernetes builds it.
// EngineSpec.Binary is its executable.
const StockEngine = "stock"

// IsStock reports whether this is a kube-apiserver as Kubernetes builds it.
func (s EngineSpec) IsStock() bool { return s.Engine == StockEngine }

// command are the arguments that precede the flags of kube-apiserver: a stock one has neither
// subcommands nor --engine.
func (s EngineSpec) command() []string {
	if s.IsStock() {
		return nil
	}
	return []string{"apiserver", "--engine=" + s.Engine}
}

// VersionArgs are the arguments with which the executable prints its version.
func (s EngineSpec) VersionArgs() []string {
	if s.IsStock() {
		return []string{"--version"}
	}
	return []string{"version"}
}
