# Stands in for conda where SWE-bench sources /opt/miniconda3/bin/activate and etc/profile.d/conda.sh.
conda() {
    case "${1-}" in
        activate) export CONDA_DEFAULT_ENV="${2:-base}" PATH="/opt/miniconda3/envs/${2:-base}/bin:$PATH" ;;
        info) echo /opt/miniconda3 ;;
    esac
}
