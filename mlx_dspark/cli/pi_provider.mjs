// An extension for pi (https://pi.dev): the server that `mlx-dspark pi` found, as a provider.
export default function (pi) {
  pi.registerProvider("mlx-dspark", JSON.parse(process.env.PI_MLX_DSPARK_PROVIDER));
}
